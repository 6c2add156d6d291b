"""The plan on a GPU: no sort, nothing of the size of a history is read or written as a whole.

Duplicates are found through the dense map. A position without a hot slot has NO_SLOT there, so its
entry is free to be claimed: of all places in the selection that name it the first one leaves its
code (below NO_SLOT), by a scatter-minimum. Every entry with a code is written again before the end.

1. look up  each place of the selection: hot slot (marked as used), tail slot, or neither
   claim    XLA's scatter-minimum, for what is not hot
2. survey   the age of every slot that the request holds, and how many are how old
3. number   the first places, in order: of misses, and of what is in the tail
   choose   the least age of a victim, by search; the victims by page list
   forget   the codes of what is in the tail
   fill     every victim goes to its miss, what is left to retiring positions, and the tables forget
            what it held; misses without a victim get staging slots
   locate   every place of a miss: its new slot
   forget   the codes of what is staged

Four launches. Looking up, claiming and surveying know no order and spread over the device. The rest
is one program per request, since requests share nothing but the arrays that hold them (slots of
their own pages, their own row of the map): its stages wait for each other at barriers instead of
launches.

Traffic: a selection is read once; locations, claims and the three columns of fetches are written
once; claims are read twice, the second time from L1. One sector per look-up and again for what is
not hot; one for each mark, which a program writes about once per slot however many queries use it;
two words per held slot, and its age once, and again per cut of the range of ages.

Latency of the program of a request, in steps that wait for each other: a round trip to L2 is 0.5 to
1 us; a scan or a sum over its threads 0.2 to 0.5 us; a scatter 1 us per 8,192 lanes, live or not,
since Triton moves its operands between threads first. So what a block of places or of slots needs
is under way while the block before is handled. Then a block of places takes a scan and a scatter to
number, one store to locate; a block of slots a read of L2 and a sum for each cut of the ages, a
scan and one scatter to choose, from the first block on that holds a victim; a block of misses two
round trips and four short scatters to fill.
Stages without work (no victim, nothing staged) are loops of no rounds.

Why a thread reads what another one wrote: writing and reading of the same array in one launch
happens within one program of the last, with `barrier` between. That is bar.sync, which orders all
accesses of its threads for each other; they share one L1, and no load is of the non-coherent kind.
There is a barrier between reading and writing the same entries, too: where a block is smaller than
the program, several threads read each entry, and all must find the same. Look-up only reads the
map, and the atomics of the claims are a launch of their own.

What would have to change when Pallas-Triton goes: nothing here needs more than loads, stores, sums
and scans. An atomic minimum in the look-up would save the launch of the claims, but Pallas-Triton
lowers that for numbers, not for blocks of integers.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common.ids import NO_SLOT, masked
from pallas_kernels.plan.triton_blocks import (
    Asked,
    Kept,
    Made,
    Pair,
    Sizes,
    Tuning,
    barrier,
    claimed,
    gather,
    gather_positions,
    launch,
    only,
    place_code,
    put,
    rank_code,
    scatter,
    store_block,
)
from pallas_kernels.plan.triton_look_up import look_up
from pallas_kernels.plan.triton_victims import choose, survey, surveyed
from pallas_kernels.plan.types import PlanCounts, PlanInput, PlanResult, PlanTables

State = TypeVar("State")


def supports(requests: int, capacity: int) -> str | None:
    """Why the kernels do not plan for a table of this size; None if they do."""
    if requests * capacity >= 2**31:
        return f"a table of {requests} x {capacity} positions is not indexed by 32 bits"
    return None


def plan(
    wanted: PlanInput,
    tables: PlanTables,
    *,
    page_slots: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[PlanResult, PlanTables]:
    """See `api.plan`.

    Raises:
        NotImplementedError: if the kernels do not support the sizes.
    """
    requests, queries, k = wanted.selection.shape
    if reason := supports(*tables.slot_of.shape):
        raise NotImplementedError(reason)
    sizes = Sizes(
        requests=requests,
        places=queries * k,
        retiring=wanted.retiring.shape[1],
        staging=wanted.staging.shape[1],
        capacity=tables.slot_of.shape[1],
        page_slots=page_slots,
        max_pages=wanted.pages.shape[1],
        tuning=tuning or Tuning(),
        interpret=interpret,
    )
    kept, claims = look_up(wanted, tables, sizes)
    kept, made = _settle(wanted, kept, claims, sizes)
    result = PlanResult(
        location=kept.location.reshape(wanted.selection.shape),
        fetch_position=kept.fetch_position,
        fetch_slot=kept.fetch_slot,
        fetch_evicted=kept.fetch_evicted,
        retire_position=made.retire_position,
        retire_slot=made.retire_slot,
        retire_evicted=made.retire_evicted,
        held=made.held,
        counts=PlanCounts(made.selected, made.hit, made.tail, made.fetched, made.staged),
    )
    return result, PlanTables(kept.slot_of, kept.position, kept.mark)


def _settle(
    wanted: PlanInput, kept: Kept, claims: Int[Array, "R U"], sizes: Sizes
) -> tuple[Kept, Made]:
    """The plan, and scratch."""
    count, retiring = (sizes.requests,), (sizes.requests, sizes.retiring)
    step = wanted.step.reshape(1)
    slots = survey(wanted.pages, step, kept, sizes)
    return launch(
        _settle_kernel,
        sizes,
        Asked(
            claim=claims,
            retiring=wanted.retiring,
            staging=wanted.staging if sizes.staging else None,
            pages=wanted.pages,
            step=step,
            ages=slots.ages,
            figures=slots.figures,
            oldest=slots.oldest,
        ),
        kept,
        Made(
            retire_position=retiring,
            retire_slot=retiring,
            retire_evicted=retiring,
            held=count,
            selected=count,
            hit=count,
            tail=count,
            fetched=count,
            staged=count,
            firsts=(sizes.requests, 2 * sizes.places),
            victims=(sizes.requests, sizes.places + sizes.retiring),
        ),
        warps=sizes.tuning.warps,
    )


def _settle_kernel(
    asked: Asked,
    _: Kept,
    kept: Kept,
    made: Made,
    *,
    sizes: Sizes,
) -> None:
    row = pl.program_id(0)
    missing, tail = _number(asked, kept, made, row, sizes)
    retiring, count = _rank_retiring(asked, kept, row, sizes)
    slots = surveyed(asked, row, sizes)
    victims = jnp.minimum(missing + count, slots.free)
    barrier(sizes)  # first places
    choose(asked, made, row, slots, victims, sizes)
    _forget(kept, made, row, sizes.places, tail, sizes)
    barrier(sizes)  # victims, and what is in the tail and may retire has no code any more
    _fill(asked, kept, made, row, missing, victims, sizes)
    _retire(asked, kept, made, row, retiring, missing, victims, sizes)
    _stage(asked, kept, made, row, missing, victims, sizes)
    barrier(sizes)  # slots of positions
    _locate(asked, kept, row, missing, victims, sizes)
    barrier(sizes)  # codes of staged positions have been read
    _forget(kept, made, row, victims, missing - victims, sizes)
    plgpu.store(made.held.at[row], slots.used + slots.free - jnp.maximum(slots.empty - victims, 0))
    plgpu.store(made.selected.at[row], slots.used + tail + missing)
    plgpu.store(made.hit.at[row], slots.used)
    plgpu.store(made.tail.at[row], tail)
    plgpu.store(made.fetched.at[row], missing)
    plgpu.store(made.staged.at[row], jnp.maximum(missing - victims, 0))


def _block(number: jax.Array | int, sizes: Sizes) -> Int[Array, " block"]:
    """A block of places."""
    return number * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)


def _each_claim(
    asked: Asked,
    kept: Kept,
    row: jax.Array,
    body: Callable[[jax.Array, Pair, State], State],
    state: State,
    sizes: Sizes,
    *,
    misses: bool,
    rounds: jax.Array | int,
) -> State:
    """`state = body(place, (claim, entry of the map), state)` for every block of places.

    The entries of a block, of what claims one or of `misses` only, are under way while the block
    before is handled, and the claims of the next one, too.
    """

    def claims(block: jax.Array | int) -> jax.Array:
        place = _block(block, sizes)
        return plgpu.load(
            asked.claim.at[row, place], mask=place < sizes.places, other=sizes.entries
        )

    def look(claim: jax.Array) -> Pair:
        position, miss = claimed(claim, row, sizes)
        return claim, gather(kept.slot_of, row, position, miss if misses else position >= 0)

    def step(block: jax.Array, carried: tuple[Pair, jax.Array, State]) -> Any:  # noqa: ANN401
        here, after, state = carried
        ahead, there = claims(block + 2), look(after)
        return there, ahead, body(_block(block, sizes), here, state)

    return lax.fori_loop(0, rounds, step, (look(claims(0)), claims(1), state))[2]


def _number(asked: Asked, kept: Kept, made: Made, row: jax.Array, sizes: Sizes) -> Pair:
    """List the positions of misses by their first places, and those in the tail; count both.

    A place that did not claim, or came later, finds another value than its code in the map.
    """

    def number(place: jax.Array, found: Pair, before: Pair) -> Pair:
        position, miss = claimed(found[0], row, sizes)
        first = (position >= 0) & (found[1] == place_code(place, sizes.places))
        missing = first & miss
        # One scan counts both: positions in the tail in the high half of a word.
        one = jnp.where(missing, 1, jnp.where(first, 1 << 16, 0)).astype(jnp.int32)
        ahead, total = jnp.cumsum(one, dtype=jnp.int32) - one, jnp.sum(one)
        in_tail = sizes.places + before[1] + (ahead >> 16)
        rank = jnp.where(missing, before[0] + (ahead & 0xFFFF), in_tail)
        scatter(made.firsts, row, rank, position, first)
        return before[0] + (total & 0xFFFF), before[1] + (total >> 16)

    none = jnp.int32(0), jnp.int32(0)
    return _each_claim(asked, kept, row, number, none, sizes, misses=False, rounds=sizes.blocks)


def _rank_retiring(
    asked: Asked, kept: Kept, row: jax.Array, sizes: Sizes
) -> tuple[Pair, jax.Array]:
    """Retiring positions, numbers of those without a hot slot (else NO_SLOT), and their count."""
    place = jnp.arange(pl.next_power_of_2(sizes.retiring), dtype=jnp.int32)
    position = gather_positions(asked.retiring, row, place, sizes)
    cold = (position >= 0) & (gather(kept.slot_of, row, position, position >= 0) < 0)
    one = cold.astype(jnp.int32)
    rank = jnp.cumsum(one, dtype=jnp.int32) - 1
    return (position, masked(rank, cold)), jnp.sum(one)


def _moves(number: jax.Array, sizes: Sizes) -> Int[Array, " moves"]:
    """A block of numbers of misses."""
    return number * sizes.tuning.moves + jnp.arange(sizes.tuning.moves, dtype=jnp.int32)


def _rounds(count: jax.Array, sizes: Sizes) -> jax.Array:
    """How many blocks of `_moves` hold `count` numbers; none if it is negative."""
    return (jnp.maximum(count, 0) + sizes.tuning.moves - 1) // sizes.tuning.moves


def _fill(
    asked: Asked,
    kept: Kept,
    made: Made,
    row: jax.Array,
    missing: jax.Array,
    victims: jax.Array,
    sizes: Sizes,
) -> None:
    """Misses take the first victims, and the tables say so."""
    step, count = only(asked.step), jnp.minimum(missing, victims)

    def fill(block: jax.Array, _: None) -> None:
        rank = _moves(block, sizes)
        live = rank < count
        position = gather(made.firsts, row, rank, live)
        slot = gather(made.victims, row, rank, live)
        store_block(kept.fetch_position, row, rank, position, live)
        store_block(kept.fetch_slot, row, rank, slot, live)
        evicted = put(kept, row, (position, slot, live), step, sizes)
        store_block(kept.fetch_evicted, row, rank, evicted, live)

    lax.fori_loop(0, _rounds(count, sizes), fill, None)


def _retire(
    asked: Asked,
    kept: Kept,
    made: Made,
    row: jax.Array,
    retiring: Pair,
    missing: jax.Array,
    victims: jax.Array,
    sizes: Sizes,
) -> None:
    """Retiring positions get the victims that no miss took, while they last."""
    position, rank = retiring
    place = jnp.arange(position.shape[0], dtype=jnp.int32)
    live = (rank >= 0) & (missing + rank < victims)
    slot = gather(made.victims, row, missing + rank, live)
    inside = place < sizes.retiring
    store_block(made.retire_position, row, place, masked(position, live), inside)
    store_block(made.retire_slot, row, place, slot, inside)
    evicted = put(kept, row, (position, slot, live), only(asked.step), sizes)
    store_block(made.retire_evicted, row, place, evicted, inside)


def _stage(
    asked: Asked,
    kept: Kept,
    made: Made,
    row: jax.Array,
    missing: jax.Array,
    victims: jax.Array,
    sizes: Sizes,
) -> None:
    """Misses that got no victim get staging slots, and leave their numbers in the map."""

    def stage(block: jax.Array, _: None) -> None:
        number = _moves(block, sizes)
        rank = victims + number
        live = rank < missing
        position = gather(made.firsts, row, rank, live)
        store_block(kept.fetch_position, row, rank, position, live)
        store_block(kept.fetch_slot, row, rank, _staging(asked, row, number, live, sizes), live)
        scatter(kept.slot_of, row, position, rank_code(rank, sizes.places), live)

    lax.fori_loop(0, _rounds(missing - victims, sizes), stage, None)


def _staging(
    asked: Asked, row: jax.Array, number: jax.Array, live: jax.Array, sizes: Sizes
) -> jax.Array:
    """Staging slots by number where live; NO_SLOT beyond the last."""
    if asked.staging is None:
        return jnp.full_like(number, NO_SLOT)
    return gather(asked.staging, row, number, live & (number < sizes.staging))


def _locate(
    asked: Asked,
    kept: Kept,
    row: jax.Array,
    missing: jax.Array,
    victims: jax.Array,
    sizes: Sizes,
) -> None:
    """Tell every place of a miss its new slot."""

    def locate(place: jax.Array, found: Pair, _: None) -> None:
        live = claimed(found[0], row, sizes)[1]
        number = rank_code(found[1], sizes.places) - victims
        staged = _staging(asked, row, number, live & (found[1] < 0), sizes)
        slot = jnp.where(found[1] < 0, staged, found[1])
        store_block(kept.location, row, place, slot, live)

    rounds = sizes.blocks * (missing > 0).astype(jnp.int32)
    _each_claim(asked, kept, row, locate, None, sizes, misses=True, rounds=rounds)


def _forget(
    kept: Kept, made: Made, row: jax.Array, start: jax.Array | int, count: jax.Array, sizes: Sizes
) -> None:
    """The map forgets the codes of a part of the first places."""

    def forget(block: jax.Array, _: None) -> None:
        number = _moves(block, sizes)
        position = gather(made.firsts, row, start + number, number < count)
        scatter(kept.slot_of, row, position, NO_SLOT, position >= 0)

    lax.fori_loop(0, _rounds(count, sizes), forget, None)
