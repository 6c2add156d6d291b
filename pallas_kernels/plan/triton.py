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

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.plan.triton_blocks import (
    EMPTY,
    NOT_HELD,
    Block,
    First,
    Found,
    Launch,
    Sizes,
    Tuning,
    block_of,
    gather,
    gather_slots,
    launch_kernel,
    only,
    place_code,
    scatter,
    scatter_slots,
    staged_code,
    store_block,
)
from pallas_kernels.plan.triton_victims import held_blocks, held_slots, victims_of
from pallas_kernels.plan.types import PlanCounts, PlanInput, PlanResult, PlanTables


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
        paged=tables.position.shape[0],
        tuning=tuning or Tuning(),
    )
    selection = wanted.selection.reshape(requests, -1)
    step = wanted.step.reshape(1)
    launch = functools.partial(launch_kernel, sizes, interpret)
    location, claim, tables = _look_up(launch, sizes, selection, wanted.tail_slot, step, tables)
    tables = tables._replace(slot_of=_claim(tables.slot_of, claim, sizes.places))
    first, ages = _survey(launch, sizes, selection, location, wanted.pages, step, tables)
    victims, retire_rank, found = victims_of(launch, sizes, first, ages, wanted, tables.slot_of)
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


def _put(
    tables: tuple[jax.Ref, jax.Ref, jax.Ref],
    row: jax.Array,
    content: tuple[jax.Array, jax.Array, jax.Array],
    step: jax.Array,
) -> None:
    """Put positions into slots where live: forget what the slots held, record what they hold."""
    slot_of_ref, position_ref, mark_ref = tables
    position, slot, live = content
    old = gather_slots(position_ref, slot, live)
    scatter(slot_of_ref, row, old, NO_SLOT, old >= 0)
    scatter(slot_of_ref, row, position, slot, live)
    scatter_slots(position_ref, slot, position, live)
    scatter_slots(mark_ref, slot, step, live)


# 1. Look up, and claim


def _look_up(
    launch: Launch,
    sizes: Sizes,
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
    sizes: Sizes,
) -> None:
    here = block_of(sizes)
    row, place, inside = here.row, here.place, here.inside
    position = gather(selection_ref, row, place, inside)
    tail = gather(tail_ref, row, place, position >= 0)
    slot = gather(slot_of_ref, row, position, position >= 0)
    hot = slot >= 0
    scatter_slots(mark_ref, slot, only(step_ref), hot)
    store_block(location_ref, row, place, jnp.where(hot, slot, tail), inside)
    nothing = sizes.requests * sizes.capacity
    claim = jnp.where((position >= 0) & ~hot, row * sizes.capacity + position, nothing)
    store_block(claim_ref, row, place, claim, inside)


def _claim(slot_of: Int[Array, "R C"], claim: Int[Array, "R U"], places: int) -> Int[Array, "R C"]:
    """Of the places that claim an entry of the flat map, the first leaves its code there."""
    codes = place_code(jnp.arange(places, dtype=jnp.int32), places)
    codes = jnp.broadcast_to(codes, claim.shape).reshape(-1)
    flat = slot_of.reshape(-1).at[claim.reshape(-1)].min(codes, mode="drop")
    return flat.reshape(slot_of.shape)


def _first_places(
    block: Block, refs: tuple[jax.Ref, jax.Ref, jax.Ref], sizes: Sizes
) -> tuple[jax.Array, Bool[Array, " block"], Bool[Array, " block"]]:
    """Positions of a block; the first places of missing positions, and of those in the tail.

    A place that did not claim, or came later, finds another value than its code in the map.
    """
    selection_ref, location_ref, slot_of_ref = refs
    row, _, place, inside = block
    position = gather(selection_ref, row, place, inside)
    location = gather(location_ref, row, place, inside)
    claimed = (position >= 0) & ((location < 0) | (location >= sizes.paged))
    code = gather(slot_of_ref, row, position, claimed)
    first = claimed & (code == place_code(place, sizes.places))
    return position, first & (location < 0), first & (location >= 0)


# 2. Survey


def _survey(
    launch: Launch,
    sizes: Sizes,
    selection: Int[Array, "R U"],
    location: Int[Array, "R U"],
    pages: Int[Array, "R Pmax"],
    step: Int[Array, " 1"],
    tables: PlanTables,
) -> tuple[First, Int[Array, "R slots"]]:
    """First places per block, and the age of every slot by page list."""
    counts = (sizes.requests, sizes.blocks)
    missing, tail, ages = launch(
        _survey_kernel,
        (selection, location, pages, step, *tables),
        (counts, counts, (sizes.requests, sizes.slot_blocks * sizes.tuning.slots)),
        blocks=max(sizes.blocks, sizes.slot_blocks),
    )
    return First(missing, tail), ages


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
    sizes: Sizes,
) -> None:
    block = block_of(sizes)
    row = block.row

    @pl.when(block.number < sizes.blocks)
    def _count_first_places() -> None:
        refs = selection_ref, location_ref, slot_of_ref
        _, missing, tail = _first_places(block, refs, sizes)
        plgpu.store(missing_ref.at[row, block.number], jnp.sum(missing.astype(jnp.int32)))
        plgpu.store(tail_ref.at[row, block.number], jnp.sum(tail.astype(jnp.int32)))

    @pl.when(block.number < held_blocks(pages_ref, row, sizes))
    def _age_slots() -> None:
        number, slot, held = held_slots(pages_ref, row, block.number, sizes)
        empty = gather_slots(position_ref, slot, held) < 0
        unused = only(step_ref) - gather_slots(mark_ref, slot, held)
        age = jnp.where(empty, EMPTY, jnp.clip(unused, 0, EMPTY - 1))
        store_block(ages_ref, row, number, jnp.where(held, age, NOT_HELD), number >= 0)


def _fill(
    launch: Launch,
    sizes: Sizes,
    selection: Int[Array, "R U"],
    location: Int[Array, "R U"],
    first: First,
    victims: Int[Array, "R n"],
    found: Found,
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
    sizes: Sizes,
) -> None:
    row, number, place, inside = block = block_of(sizes)
    refs = selection_ref, location_ref, slot_of_ref
    position, missing, tail = _first_places(block, refs, sizes)
    other = jnp.arange(pl.next_power_of_2(sizes.blocks), dtype=jnp.int32)
    earlier = gather(missing_ref, row, other, other < number)
    one = missing.astype(jnp.int32)
    rank = jnp.sum(jnp.maximum(earlier, 0)) + jnp.cumsum(one, dtype=jnp.int32) - one
    victims = plgpu.load(count_ref.at[row])
    hot = missing & (rank < victims)
    overflow = rank - victims
    staged = missing & (overflow >= 0)
    slot = jnp.where(
        staged,
        gather(staging_ref, row, overflow, staged & (overflow < sizes.staging)),
        gather(victims_ref, row, rank, hot),
    )
    scatter(fetch_position_ref, row, rank, position, missing)
    scatter(fetch_slot_ref, row, rank, slot, missing)
    beyond = inside & (place >= plgpu.load(fetched_ref.at[row]))
    store_block(fetch_position_ref, row, place, NO_SLOT, beyond)
    store_block(fetch_slot_ref, row, place, NO_SLOT, beyond)
    scatter(slot_of_ref, row, position, NO_SLOT, tail)
    code = jnp.where(overflow < sizes.staging, staged_code(overflow, sizes.places), NO_SLOT)
    scatter(slot_of_ref, row, position, code, staged)
    tables = slot_of_ref, position_ref, mark_ref
    _put(tables, row, (position, slot, hot), only(step_ref))


# 5. Locate, and retire


def _locate(
    launch: Launch,
    sizes: Sizes,
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
    sizes: Sizes,
) -> None:
    row, block, place, inside = block_of(sizes)
    position = gather(selection_ref, row, place, inside)
    missing = (position >= 0) & (gather(location_ref, row, place, inside) < 0)
    slot = gather(slot_of_ref, row, position, missing)
    number = staged_code(slot, sizes.places)  # its own inverse
    staged = missing & (slot < NO_SLOT) & (number < sizes.staging)
    slot = jnp.where(slot < 0, gather(staging_ref, row, number, staged), slot)
    store_block(location_ref, row, place, slot, missing)

    # No place of any block reads what this writes: retiring positions are not missing, and a
    # victim is not selected.
    @pl.when(block == 0)
    def _retire() -> None:
        place = jnp.arange(pl.next_power_of_2(sizes.retiring), dtype=jnp.int32)
        inside = place < sizes.retiring
        rank = gather(retire_rank_ref, row, place, inside)
        live = rank >= 0
        position = gather(retiring_ref, row, place, live)
        slot = gather(victims_ref, row, rank, live)
        store_block(retire_position_ref, row, place, position, inside)
        store_block(retire_slot_ref, row, place, slot, inside)
        tables = slot_of_ref, position_ref, mark_ref
        _put(tables, row, (position, slot, live), only(step_ref))


# 6. Forget


def _forget_staged(
    launch: Launch,
    sizes: Sizes,
    fetch_position: Int[Array, "R U"],
    found: Found,
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
    sizes: Sizes,
) -> None:
    here = block_of(sizes)
    row, place, inside = here.row, here.place, here.inside
    staged = inside & (place < plgpu.load(fetched_ref.at[row]))
    staged = staged & (place >= plgpu.load(count_ref.at[row]))
    position = gather(fetch_position_ref, row, place, staged)
    scatter(slot_of_ref, row, position, NO_SLOT, staged)
