"""The plan on a GPU: no sort, nothing of the size of a history is read or written as a whole.

Duplicates are found through the dense map. A position without a hot slot has NO_SLOT there, so its
entry is free to be claimed: of all places in the selection that name it the first one leaves its
code (below NO_SLOT), by a scatter-minimum. Every entry with a code is written again before the end.

1. look up  each place of the selection: hot slot (marked as used), tail slot, or neither
   claim    XLA's scatter-minimum, for what is not hot
2. survey   first places per block, by their codes; the age of each slot that the request holds
3. victims  the rank of the least age among the victims, by bisection; their slots in order
4. fill     every miss gets a slot; the tables forget the victims; codes of tail positions go
5. locate   what missed: its new slot. And the retiring positions get theirs
6. forget   the codes of staged positions go (where the step can have some)

One program is a block of one request, but for `victims`, where a request is a program. Traffic:
selection, tail slots and locations once or twice each, one sector per look-up, ages of the held
slots about ten times from L1. Each kernel waits for the one before it: launches are a large part
of the time for few requests. What would have to change when Pallas-Triton goes: nothing here needs
more than loads, stores, sums and scans.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.triton_select import middle, ranks
from pallas_kernels.plan.types import PlanCounts, PlanInput, PlanResult, PlanTables

EMPTY = 2**30
"""Age of an empty slot: older than any other."""

NOT_HELD = -1
"""Age of what is no slot of the request. A slot of the working set has age 0."""

ANY = pl.BlockSpec(memory_space=pl.ANY)


class Tuning(NamedTuple):
    """Sizes of the programs.

    Attributes:
        block: places of a selection that a program handles.
        warps: its warps.
        slots: slots whose ages are looked at together.
        victim_warps: warps of the program that chooses the victims of a request.
    """

    block: int = 1024
    warps: int = 4
    slots: int = 2048
    victim_warps: int = 16


class _Sizes(NamedTuple):
    """Static sizes: U places of a selection, Q retiring positions, and the blocks of both."""

    requests: int
    places: int
    retiring: int
    staging: int
    capacity: int
    page_slots: int
    max_pages: int
    paged: int
    tuning: Tuning

    @property
    def blocks(self) -> int:
        """Blocks of a selection."""
        return pl.cdiv(self.places, self.tuning.block)

    @property
    def slot_blocks(self) -> int:
        """Blocks of the slots that a request can hold."""
        return pl.cdiv(self.max_pages * self.page_slots, self.tuning.slots)


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
    sizes = _Sizes(
        requests=requests,
        places=queries * k,
        retiring=wanted.retiring.shape[1],
        staging=wanted.staging.shape[1],
        capacity=tables.slot_of.shape[1],
        page_slots=page_slots,
        max_pages=wanted.pages.shape[1],
        paged=tables.position.shape[0],
        tuning=tuning or Tuning(),
    )
    selection = wanted.selection.reshape(requests, -1)
    step = wanted.step.reshape(1)
    launch = functools.partial(_launch, sizes, interpret)
    location, claim, tables = _look_up(launch, sizes, selection, wanted.tail_slot, step, tables)
    tables = tables._replace(slot_of=_claim(tables.slot_of, claim, sizes.places))
    first, ages = _survey(launch, sizes, selection, location, wanted.pages, step, tables)
    victims, retire_rank, found = _victims(launch, sizes, first, ages, wanted, tables.slot_of)
    staging = wanted.staging if sizes.staging else jnp.full((requests, 1), NO_SLOT, jnp.int32)
    fetch, tables = _fill(
        launch, sizes, selection, location, first, victims, found, staging, step, tables
    )
    location, retire, tables = _locate(
        launch, sizes, selection, location, victims, retire_rank, wanted, staging, tables
    )
    if sizes.staging:
        tables = _forget_staged(launch, sizes, fetch[0], found, tables)
    result = PlanResult(
        location=location.reshape(wanted.selection.shape),
        fetch_position=fetch[0],
        fetch_slot=fetch[1],
        retire_position=retire[0],
        retire_slot=retire[1],
        counts=PlanCounts(
            selected=found.hit + found.tail + found.fetched,
            hit=found.hit,
            tail=found.tail,
            fetched=found.fetched,
            staged=jnp.maximum(found.fetched - found.victims, 0),
        ),
    )
    return result, tables


class _Found(NamedTuple):
    """What `victims` counts per request; the last is how many victims there are."""

    hit: Int[Array, " R"]
    tail: Int[Array, " R"]
    fetched: Int[Array, " R"]
    victims: Int[Array, " R"]


class _First(NamedTuple):
    """First places of missing and of tail positions, per block of the selection."""

    missing: Int[Array, "R blocks"]
    tail: Int[Array, "R blocks"]


Launch = Callable[..., tuple[jax.Array, ...]]
"""`_launch` with its first two arguments."""


def _launch(
    sizes: _Sizes,
    interpret: bool,
    kernel: Callable[..., None],
    operands: tuple[jax.Array, ...],
    outputs: tuple[tuple[int, ...], ...],
    *,
    blocks: int = 0,
    in_place: dict[int, int] | None = None,
    **options: int,
) -> tuple[jax.Array, ...]:
    """Run `kernel` on every request and block; all arrays are int32 and addressed as a whole.

    Without `blocks` a request is one program. `in_place` leads from operands to outputs.
    """
    alone = blocks == 0
    tuning = sizes.tuning
    call = pl.pallas_call(
        functools.partial(kernel, sizes=sizes, **options),
        grid=(sizes.requests,) if alone else (sizes.requests, blocks),
        in_specs=[ANY] * len(operands),
        out_specs=(ANY,) * len(outputs),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outputs),
        input_output_aliases=in_place or {},
        compiler_params=plgpu.CompilerParams(
            num_warps=tuning.victim_warps if alone else tuning.warps, num_stages=1
        ),
        interpret=interpret,
        name=f"plan_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )
    return tuple(call(*operands))


class _Block(NamedTuple):
    """What a program handles: places of the selection of one request.

    Asked for once, at the top of a kernel: interpret mode knows no program ids inside conditions.
    """

    row: jax.Array
    number: jax.Array
    place: Int[Array, " block"]
    inside: Bool[Array, " block"]


def _block(sizes: _Sizes) -> _Block:
    number = pl.program_id(1)
    place = number * sizes.tuning.block + jnp.arange(sizes.tuning.block, dtype=jnp.int32)
    return _Block(pl.program_id(0), number, place, place < sizes.places)


def _gather(ref: jax.Ref, row: jax.Array, ids: jax.Array, live: jax.Array) -> jax.Array:
    """`ref[row, ids]` where live, else NO_SLOT."""
    return plgpu.load(ref.at[row, ids], mask=live, other=NO_SLOT)


def _gather_slots(ref: jax.Ref, slots: jax.Array, live: jax.Array) -> jax.Array:
    """`ref[slots]` where live, else NO_SLOT."""
    return plgpu.load(ref.at[slots], mask=live, other=NO_SLOT)


def _store(
    ref: jax.Ref, row: jax.Array, place: jax.Array, values: jax.Array | int, live: jax.Array
) -> None:
    """`ref[row, place] = values` where live, for places that are all distinct."""
    values = jnp.broadcast_to(jnp.asarray(values, jnp.int32), place.shape)
    plgpu.store(ref.at[row, place], values, mask=live)


def _scatter(
    ref: jax.Ref, row: jax.Array, ids: jax.Array, values: jax.Array | int, live: jax.Array
) -> None:
    """`ref[row, ids] = values` where live.

    What is not live goes past the end: interpret mode has no masks, but drops such an index.
    """
    _store(ref, row, jnp.where(live, ids, ref.shape[1]), values, live)


def _scatter_slots(ref: jax.Ref, slots: jax.Array, values: jax.Array, live: jax.Array) -> None:
    """`ref[slots] = values` where live."""
    slots = jnp.where(live, slots, ref.shape[0])
    plgpu.store(ref.at[slots], jnp.broadcast_to(values, slots.shape), mask=live)


def _only(ref: jax.Ref) -> Int[Array, " 1"]:
    """All of an array of one; interpret mode knows no constant as an index."""
    return plgpu.load(ref.at[jnp.arange(1, dtype=jnp.int32)])


def _code(place: jax.Array | int, places: int) -> jax.Array | int:
    """What a place leaves in the map to claim its position: -U - 1 for the first to -2."""
    return place - places - 1


def _staged_code(number: jax.Array, places: int) -> jax.Array:
    """What stands in the map for staging slot `number` until it is forgotten: below every code."""
    return -places - 2 - number


def _put(
    tables: tuple[jax.Ref, jax.Ref, jax.Ref],
    row: jax.Array,
    content: tuple[jax.Array, jax.Array, jax.Array],
    step: jax.Array,
) -> None:
    """Put positions into slots where live: forget what the slots held, record what they hold."""
    slot_of_ref, position_ref, mark_ref = tables
    position, slot, live = content
    old = _gather_slots(position_ref, slot, live)
    _scatter(slot_of_ref, row, old, NO_SLOT, old >= 0)
    _scatter(slot_of_ref, row, position, slot, live)
    _scatter_slots(position_ref, slot, position, live)
    _scatter_slots(mark_ref, slot, step, live)


# 1. Look up, and claim


def _look_up(
    launch: Launch,
    sizes: _Sizes,
    selection: Int[Array, "R U"],
    tail_slot: Int[Array, "R T K"],
    step: Int[Array, " 1"],
    tables: PlanTables,
) -> tuple[Int[Array, "R U"], Int[Array, "R U"], PlanTables]:
    """Hot or tail slot of each place, what it claims, and the tables with the hits marked."""
    shape = selection.shape
    location, claim, mark = launch(
        _look_up_kernel,
        (selection, tail_slot.reshape(shape), tables.slot_of, step, tables.mark),
        (shape, shape, tables.mark.shape),
        blocks=sizes.blocks,
        in_place={4: 2},
    )
    return location, claim, tables._replace(mark=mark)


def _look_up_kernel(
    selection_ref: jax.Ref,  # [R, U]
    tail_ref: jax.Ref,  # [R, U]
    slot_of_ref: jax.Ref,  # [R, C]
    step_ref: jax.Ref,  # [1]
    _: jax.Ref,  # [slots]
    location_ref: jax.Ref,  # [R, U]
    claim_ref: jax.Ref,  # [R, U]
    mark_ref: jax.Ref,  # [slots]
    *,
    sizes: _Sizes,
) -> None:
    row, _, place, inside = _block(sizes)
    position = _gather(selection_ref, row, place, inside)
    tail = _gather(tail_ref, row, place, position >= 0)
    slot = _gather(slot_of_ref, row, position, position >= 0)
    hot = slot >= 0
    _scatter_slots(mark_ref, slot, _only(step_ref), hot)
    _store(location_ref, row, place, jnp.where(hot, slot, tail), inside)
    nothing = sizes.requests * sizes.capacity
    claim = jnp.where((position >= 0) & ~hot, row * sizes.capacity + position, nothing)
    _store(claim_ref, row, place, claim, inside)


def _claim(slot_of: Int[Array, "R C"], claim: Int[Array, "R U"], places: int) -> Int[Array, "R C"]:
    """Of the places that claim an entry of the flat map, the first leaves its code there."""
    codes = _code(jnp.arange(places, dtype=jnp.int32), places)
    codes = jnp.broadcast_to(codes, claim.shape).reshape(-1)
    flat = slot_of.reshape(-1).at[claim.reshape(-1)].min(codes, mode="drop")
    return flat.reshape(slot_of.shape)


def _first_places(
    block: _Block, refs: tuple[jax.Ref, jax.Ref, jax.Ref], sizes: _Sizes
) -> tuple[jax.Array, Bool[Array, " block"], Bool[Array, " block"]]:
    """Positions of a block; the first places of missing positions, and of those in the tail.

    A place that did not claim, or came later, finds another value than its code in the map.
    """
    selection_ref, location_ref, slot_of_ref = refs
    row, _, place, inside = block
    position = _gather(selection_ref, row, place, inside)
    location = _gather(location_ref, row, place, inside)
    claimed = (position >= 0) & ((location < 0) | (location >= sizes.paged))
    code = _gather(slot_of_ref, row, position, claimed)
    first = claimed & (code == _code(place, sizes.places))
    return position, first & (location < 0), first & (location >= 0)


# 2. Survey


def _survey(
    launch: Launch,
    sizes: _Sizes,
    selection: Int[Array, "R U"],
    location: Int[Array, "R U"],
    pages: Int[Array, "R Pmax"],
    step: Int[Array, " 1"],
    tables: PlanTables,
) -> tuple[_First, Int[Array, "R slots"]]:
    """First places per block, and the age of every slot by page list."""
    counts = (sizes.requests, sizes.blocks)
    missing, tail, ages = launch(
        _survey_kernel,
        (selection, location, pages, step, *tables),
        (counts, counts, (sizes.requests, sizes.slot_blocks * sizes.tuning.slots)),
        blocks=max(sizes.blocks, sizes.slot_blocks),
    )
    return _First(missing, tail), ages


def _survey_kernel(
    selection_ref: jax.Ref,  # [R, U]
    location_ref: jax.Ref,  # [R, U]
    pages_ref: jax.Ref,  # [R, Pmax]
    step_ref: jax.Ref,  # [1]
    slot_of_ref: jax.Ref,  # [R, C]
    position_ref: jax.Ref,  # [slots]
    mark_ref: jax.Ref,  # [slots]
    missing_ref: jax.Ref,  # [R, blocks]
    tail_ref: jax.Ref,  # [R, blocks]
    ages_ref: jax.Ref,  # [R, slot_blocks * slots]
    *,
    sizes: _Sizes,
) -> None:
    block = _block(sizes)
    row = block.row

    @pl.when(block.number < sizes.blocks)
    def _count_first_places() -> None:
        refs = selection_ref, location_ref, slot_of_ref
        _, missing, tail = _first_places(block, refs, sizes)
        plgpu.store(missing_ref.at[row, block.number], jnp.sum(missing.astype(jnp.int32)))
        plgpu.store(tail_ref.at[row, block.number], jnp.sum(tail.astype(jnp.int32)))

    @pl.when(block.number < _held_blocks(pages_ref, row, sizes))
    def _age_slots() -> None:
        number, slot, held = _held_slots(pages_ref, row, block.number, sizes)
        empty = _gather_slots(position_ref, slot, held) < 0
        unused = _only(step_ref) - _gather_slots(mark_ref, slot, held)
        age = jnp.where(empty, EMPTY, jnp.clip(unused, 0, EMPTY - 1))
        _store(ages_ref, row, number, jnp.where(held, age, NOT_HELD), number >= 0)


def _held_slots(
    pages_ref: jax.Ref, row: jax.Array, block: jax.Array, sizes: _Sizes
) -> tuple[Int[Array, " slots"], Int[Array, " slots"], Bool[Array, " slots"]]:
    """Numbers in the page list, slots, and which are held, of a block of a request's slots."""
    number = block * sizes.tuning.slots + jnp.arange(sizes.tuning.slots, dtype=jnp.int32)
    place = lax.div(number, sizes.page_slots)
    page = _gather(pages_ref, row, place, place < sizes.max_pages)
    return number, page * sizes.page_slots + lax.rem(number, sizes.page_slots), page >= 0


# 3. Victims


def _victims(
    launch: Launch,
    sizes: _Sizes,
    first: _First,
    ages: Int[Array, "R slots"],
    wanted: PlanInput,
    slot_of: Int[Array, "R C"],
) -> tuple[Int[Array, "R n"], Int[Array, "R Q"], _Found]:
    """The victims of each request by page list, and which of them each retiring position gets."""
    count = (sizes.requests,)
    most = (sizes.requests, sizes.places + sizes.retiring)
    victims, retire_rank, *found = launch(
        _victims_kernel,
        (*first, ages, wanted.pages, wanted.retiring, slot_of),
        (most, wanted.retiring.shape, count, count, count, count),
    )
    return victims, retire_rank, _Found(*found)


def _victims_kernel(
    missing_ref: jax.Ref,  # [R, blocks]
    tail_ref: jax.Ref,  # [R, blocks]
    ages_ref: jax.Ref,  # [R, slot_blocks * slots]
    pages_ref: jax.Ref,  # [R, Pmax]
    retiring_ref: jax.Ref,  # [R, Q]
    slot_of_ref: jax.Ref,  # [R, C]
    victims_ref: jax.Ref,  # [R, U + Q]
    retire_rank_ref: jax.Ref,  # [R, Q]
    hit_ref: jax.Ref,  # [R]
    found_tail_ref: jax.Ref,  # [R]
    fetched_ref: jax.Ref,  # [R]
    count_ref: jax.Ref,  # [R]
    *,
    sizes: _Sizes,
) -> None:
    row = pl.program_id(0)
    block = jnp.arange(pl.next_power_of_2(sizes.blocks), dtype=jnp.int32)
    total = lambda ref: jnp.sum(jnp.maximum(_gather(ref, row, block, block < sizes.blocks), 0))
    missing = total(missing_ref)
    place = jnp.arange(pl.next_power_of_2(sizes.retiring), dtype=jnp.int32)
    retiring = _gather(retiring_ref, row, place, place < sizes.retiring)
    retire = (retiring >= 0) & (_gather(slot_of_ref, row, retiring, retiring >= 0) < 0)
    needed = missing + jnp.sum(retire.astype(jnp.int32))
    blocks = _held_blocks(pages_ref, row, sizes)
    ages = functools.partial(_ages, ages_ref, row, sizes)
    hits, low, high, above, needed = _least_age(ages, sizes.tuning.slots, blocks, needed)
    limits = (low, high, needed - above)
    _write_victims(ages, (pages_ref, victims_ref), row, limits, blocks, sizes)
    rank = missing + jnp.cumsum(retire.astype(jnp.int32), dtype=jnp.int32) - 1
    rank = jnp.where(retire & (rank < needed), rank, NO_SLOT)
    _store(retire_rank_ref, row, place, rank, place < sizes.retiring)
    plgpu.store(hit_ref.at[row], hits)
    plgpu.store(found_tail_ref.at[row], total(tail_ref))
    plgpu.store(fetched_ref.at[row], missing)
    plgpu.store(count_ref.at[row], needed)


def _held_blocks(pages_ref: jax.Ref, row: jax.Array, sizes: _Sizes) -> Int[Array, ""]:
    """How many blocks of slots the request has: those whose first page it holds."""
    block = jnp.arange(pl.next_power_of_2(sizes.slot_blocks), dtype=jnp.int32)
    page = _gather(
        pages_ref, row, block * sizes.tuning.slots // sizes.page_slots, block < sizes.slot_blocks
    )
    return jnp.sum((page >= 0).astype(jnp.int32))


def _ages(
    ages_ref: jax.Ref, row: jax.Array, sizes: _Sizes, block: jax.Array
) -> Int[Array, " slots"]:
    number = block * sizes.tuning.slots + jnp.arange(sizes.tuning.slots, dtype=jnp.int32)
    return plgpu.load(ages_ref.at[row, number])


def _least_age(
    ages: Callable[[jax.Array], jax.Array], slots: int, blocks: jax.Array, needed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Bisect for the age of the youngest victim.

    Returns:
        Slots of the working set; (low, high, above): victims are the `above` slots of age >= high,
        and as many as are then missing of those of age >= low; how many victims there are.
    """
    zeros = jnp.zeros((slots,), jnp.int32)

    def look(block: jax.Array, seen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        age = ages(block)
        which = age == 0, age > 0, age == EMPTY
        counts = (a + b.astype(jnp.int32) for a, b in zip(seen[:3], which, strict=True))
        return (*counts, jnp.maximum(seen[3], jnp.where(age == EMPTY, 0, age)))

    *counts, oldest = lax.fori_loop(0, blocks, look, (zeros, zeros, zeros, zeros))
    hits, free, empty = (jnp.sum(count) for count in counts)
    oldest = jnp.max(oldest)
    needed = jnp.minimum(needed, free)
    from_empty = empty >= needed

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, _, reached = state
        return (low + 1 < high) & (reached != needed)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above, reached = state
        age = middle(low, high)
        add = lambda block, count: count + (ages(block) >= age).astype(jnp.int32)
        count = jnp.sum(lax.fori_loop(0, blocks, add, zeros))
        enough = count >= needed
        return (
            jnp.where(enough, age, low),
            jnp.where(enough, high, age),
            jnp.where(enough, above, count),
            jnp.where(enough, count, reached),
        )

    start = (
        # A choice between two constants: the Triton lowering of `where` types it as a boolean.
        1 + (EMPTY - 1) * from_empty.astype(jnp.int32),
        jnp.where(from_empty, EMPTY + 1, oldest + 1),
        jnp.where(from_empty, 0, empty),
        jnp.where(from_empty, empty, free),
    )
    low, high, above, _ = lax.while_loop(unfinished, halve, start)
    return hits, low, high, above, needed


def _write_victims(
    ages: Callable[[jax.Array], jax.Array],
    refs: tuple[jax.Ref, jax.Ref],
    row: jax.Array,
    limits: tuple[jax.Array, jax.Array, jax.Array],
    blocks: jax.Array,
    sizes: _Sizes,
) -> None:
    """Slots of the victims in the order of the page list."""
    pages_ref, victims_ref = refs
    low, high, ties = limits

    def write(block: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        age = ages(block)
        take, rank, after = ranks(age >= high, age >= low, ties, before)
        _, slot, _ = _held_slots(pages_ref, row, block, sizes)
        _scatter(victims_ref, row, rank, slot, take)
        return after

    zero = jnp.int32(0)
    lax.fori_loop(0, blocks, write, (zero, zero))


# 4. Fill


def _fill(
    launch: Launch,
    sizes: _Sizes,
    selection: Int[Array, "R U"],
    location: Int[Array, "R U"],
    first: _First,
    victims: Int[Array, "R n"],
    found: _Found,
    staging: Int[Array, "R G"],
    step: Int[Array, " 1"],
    tables: PlanTables,
) -> tuple[tuple[Int[Array, "R U"], Int[Array, "R U"]], PlanTables]:
    """What is fetched into which slot, and the tables with it."""
    operands = (selection, location, first.missing, victims, found.fetched, found.victims)
    shape = selection.shape
    *fetch, slot_of, position, mark = launch(
        _fill_kernel,
        (*operands, staging, step, *tables),
        (shape, shape, *(table.shape for table in tables)),
        blocks=sizes.blocks,
        in_place={8: 2, 9: 3, 10: 4},
    )
    return (fetch[0], fetch[1]), PlanTables(slot_of, position, mark)


def _fill_kernel(
    selection_ref: jax.Ref,  # [R, U]
    location_ref: jax.Ref,  # [R, U]
    missing_ref: jax.Ref,  # [R, blocks]
    victims_ref: jax.Ref,  # [R, U + Q]
    fetched_ref: jax.Ref,  # [R]
    count_ref: jax.Ref,  # [R]
    staging_ref: jax.Ref,  # [R, G]
    step_ref: jax.Ref,  # [1]
    _slot_of_ref: jax.Ref,
    _position_ref: jax.Ref,
    _mark_ref: jax.Ref,
    fetch_position_ref: jax.Ref,  # [R, U]
    fetch_slot_ref: jax.Ref,  # [R, U]
    slot_of_ref: jax.Ref,  # [R, C]
    position_ref: jax.Ref,  # [slots]
    mark_ref: jax.Ref,  # [slots]
    *,
    sizes: _Sizes,
) -> None:
    row, number, place, inside = block = _block(sizes)
    refs = selection_ref, location_ref, slot_of_ref
    position, missing, tail = _first_places(block, refs, sizes)
    other = jnp.arange(pl.next_power_of_2(sizes.blocks), dtype=jnp.int32)
    earlier = _gather(missing_ref, row, other, other < number)
    one = missing.astype(jnp.int32)
    rank = jnp.sum(jnp.maximum(earlier, 0)) + jnp.cumsum(one, dtype=jnp.int32) - one
    victims = plgpu.load(count_ref.at[row])
    hot = missing & (rank < victims)
    overflow = rank - victims
    staged = missing & (overflow >= 0)
    slot = jnp.where(
        staged,
        _gather(staging_ref, row, overflow, staged & (overflow < sizes.staging)),
        _gather(victims_ref, row, rank, hot),
    )
    _scatter(fetch_position_ref, row, rank, position, missing)
    _scatter(fetch_slot_ref, row, rank, slot, missing)
    beyond = inside & (place >= plgpu.load(fetched_ref.at[row]))
    _store(fetch_position_ref, row, place, NO_SLOT, beyond)
    _store(fetch_slot_ref, row, place, NO_SLOT, beyond)
    _scatter(slot_of_ref, row, position, NO_SLOT, tail)
    code = jnp.where(overflow < sizes.staging, _staged_code(overflow, sizes.places), NO_SLOT)
    _scatter(slot_of_ref, row, position, code, staged)
    tables = slot_of_ref, position_ref, mark_ref
    _put(tables, row, (position, slot, hot), _only(step_ref))


# 5. Locate, and retire


def _locate(
    launch: Launch,
    sizes: _Sizes,
    selection: Int[Array, "R U"],
    location: Int[Array, "R U"],
    victims: Int[Array, "R n"],
    retire_rank: Int[Array, "R Q"],
    wanted: PlanInput,
    staging: Int[Array, "R G"],
    tables: PlanTables,
) -> tuple[Int[Array, "R U"], tuple[Int[Array, "R Q"], Int[Array, "R Q"]], PlanTables]:
    """Where the missing records will be, and where the retiring ones go."""
    operands = (selection, staging, victims, wanted.retiring, retire_rank, wanted.step.reshape(1))
    retiring = wanted.retiring.shape
    location, slot_of, position, mark, *retire = launch(
        _locate_kernel,
        (*operands, location, *tables),
        (location.shape, *(table.shape for table in tables), retiring, retiring),
        blocks=sizes.blocks,
        in_place={6: 0, 7: 1, 8: 2, 9: 3},
    )
    return location, (retire[0], retire[1]), PlanTables(slot_of, position, mark)


def _locate_kernel(
    selection_ref: jax.Ref,  # [R, U]
    staging_ref: jax.Ref,  # [R, G]
    victims_ref: jax.Ref,  # [R, U + Q]
    retiring_ref: jax.Ref,  # [R, Q]
    retire_rank_ref: jax.Ref,  # [R, Q]
    step_ref: jax.Ref,  # [1]
    _location_ref: jax.Ref,
    _slot_of_ref: jax.Ref,
    _position_ref: jax.Ref,
    _mark_ref: jax.Ref,
    location_ref: jax.Ref,  # [R, U]
    slot_of_ref: jax.Ref,  # [R, C]
    position_ref: jax.Ref,  # [slots]
    mark_ref: jax.Ref,  # [slots]
    retire_position_ref: jax.Ref,  # [R, Q]
    retire_slot_ref: jax.Ref,  # [R, Q]
    *,
    sizes: _Sizes,
) -> None:
    row, block, place, inside = _block(sizes)
    position = _gather(selection_ref, row, place, inside)
    missing = (position >= 0) & (_gather(location_ref, row, place, inside) < 0)
    slot = _gather(slot_of_ref, row, position, missing)
    number = _staged_code(slot, sizes.places)  # its own inverse
    staged = missing & (slot < NO_SLOT) & (number < sizes.staging)
    slot = jnp.where(slot < 0, _gather(staging_ref, row, number, staged), slot)
    _store(location_ref, row, place, slot, missing)

    # No place of any block reads what this writes: retiring positions are not missing, and a
    # victim is not selected.
    @pl.when(block == 0)
    def _retire() -> None:
        place = jnp.arange(pl.next_power_of_2(sizes.retiring), dtype=jnp.int32)
        inside = place < sizes.retiring
        rank = _gather(retire_rank_ref, row, place, inside)
        live = rank >= 0
        position = _gather(retiring_ref, row, place, live)
        slot = _gather(victims_ref, row, rank, live)
        _store(retire_position_ref, row, place, position, inside)
        _store(retire_slot_ref, row, place, slot, inside)
        tables = slot_of_ref, position_ref, mark_ref
        _put(tables, row, (position, slot, live), _only(step_ref))


# 6. Forget


def _forget_staged(
    launch: Launch,
    sizes: _Sizes,
    fetch_position: Int[Array, "R U"],
    found: _Found,
    tables: PlanTables,
) -> PlanTables:
    """The map without the codes of staged positions."""
    (slot_of,) = launch(
        _forget_kernel,
        (fetch_position, found.fetched, found.victims, tables.slot_of),
        (tables.slot_of.shape,),
        blocks=sizes.blocks,
        in_place={3: 0},
    )
    return tables._replace(slot_of=slot_of)


def _forget_kernel(
    fetch_position_ref: jax.Ref,  # [R, U]
    fetched_ref: jax.Ref,  # [R]
    count_ref: jax.Ref,  # [R]
    _: jax.Ref,
    slot_of_ref: jax.Ref,  # [R, C]
    *,
    sizes: _Sizes,
) -> None:
    row, _, place, inside = _block(sizes)
    staged = inside & (place < plgpu.load(fetched_ref.at[row]))
    staged = staged & (place >= plgpu.load(count_ref.at[row]))
    position = _gather(fetch_position_ref, row, place, staged)
    _scatter(slot_of_ref, row, position, NO_SLOT, staged)
