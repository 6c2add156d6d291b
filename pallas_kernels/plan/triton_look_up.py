"""The first launch of a plan, and the claims: what each place of a selection names, by itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common.ids import NO_SLOT, masked
from pallas_kernels.plan.triton_blocks import (
    Begun,
    Kept,
    Lookup,
    Pair,
    Sizes,
    Touched,
    claim,
    gather,
    gather_slots,
    launch,
    only,
    place_code,
    scatter_slots,
    store_block,
)
from pallas_kernels.plan.types import PlanInput, PlanTables


def look_up(wanted: PlanInput, tables: PlanTables, sizes: Sizes) -> tuple[Kept, Int[Array, "R U"]]:
    """Hot or tail slot of every place; tables with hits marked and positions claimed; claims."""
    shape = sizes.requests, sizes.places
    touched, begun = launch(
        _look_up_kernel,
        sizes,
        Lookup(
            selection=wanted.selection.reshape(shape),
            start=wanted.tail.start,
            first=wanted.tail.first,
            length=wanted.tail.length.reshape(1),
            slot_of=tables.slot_of,
            step=wanted.step.reshape(1),
        ),
        Touched(tables.mark),
        Begun(shape, shape, shape, shape, shape),
        blocks=sizes.look_parts,
        warps=sizes.tuning.look_warps,
    )
    kept = Kept(
        location=begun.location,
        fetch_position=begun.fetch_position,
        fetch_slot=begun.fetch_slot,
        fetch_evicted=begun.fetch_evicted,
        slot_of=_claim(tables.slot_of, begun.claim),
        position=tables.position,
        mark=touched.mark,
    )
    return kept, begun.claim


def _look_up_kernel(
    asked: Lookup, _: Touched, touched: Touched, begun: Begun, *, sizes: Sizes
) -> None:
    row, part = pl.program_id(0), pl.program_id(1)
    step, tail_slots = only(asked.step), _tail_of(asked, row)
    first, end = part * sizes.look_rounds, (part + 1) * sizes.look_rounds

    def ask(number: jax.Array) -> list[jax.Array]:
        inside = lambda place: (place < sizes.places) & (number < end)
        return [
            gather(asked.selection, row, place, inside(place), keep=False)
            for place in _look_places(number, sizes)
        ]

    def look(number: jax.Array, given: list[jax.Array]) -> list[jax.Array]:
        ahead = ask(number + 1)
        positions = [jnp.where(chosen < sizes.capacity, chosen, NO_SLOT) for chosen in given]
        slots = [gather(asked.slot_of, row, position, position >= 0) for position in positions]
        for place, position, slot in zip(
            _look_places(number, sizes), positions, slots, strict=True
        ):
            tail = tail_slots(masked(position, slot < 0))
            _begin(begun, (row, place), position, (slot, tail), sizes)
        _touch(touched.mark, slots, step, sizes)
        return ahead

    lax.fori_loop(first, end, look, ask(first))


def _tail_of(asked: Lookup, row: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function from positions to their slots in the tail of a request, else NO_SLOT."""
    start, first = (plgpu.load(ref.at[row]) for ref in (asked.start, asked.first))
    length = only(asked.length)
    begin = lax.rem(jnp.broadcast_to(start, length.shape), length)

    def slots(position: Int[Array, " block"]) -> Int[Array, " block"]:
        # The ring has a slot for each position from `start` on, so no division by its length.
        offset = begin + position - start
        offset = jnp.where(offset >= length, offset - length, offset)
        return masked(first + offset, (position >= 0) & (position >= start))

    return slots


def _look_places(number: jax.Array, sizes: Sizes) -> list[Int[Array, " block"]]:
    """The places of a round: blocks of them, so that what they wait for is under way together."""
    unroll, offset = sizes.tuning.look_unroll, jnp.arange(sizes.look_block, dtype=jnp.int32)
    return [(number * unroll + block) * sizes.look_block + offset for block in range(unroll)]


def _begin(begun: Begun, where: Pair, position: jax.Array, found: Pair, sizes: Sizes) -> None:
    """Write what is known of the places of a row: hot slot or tail slot, and what they claim."""
    row, place = where
    slot, tail = found
    inside, hot = place < sizes.places, slot >= 0
    store_block(begun.location, row, place, jnp.where(hot, slot, tail), inside)
    store_block(begun.claim, row, place, claim(row, position, hot, tail >= 0, sizes), inside)
    store_block(begun.fetch_position, row, place, NO_SLOT, inside)
    store_block(begun.fetch_slot, row, place, NO_SLOT, inside)
    store_block(begun.fetch_evicted, row, place, NO_SLOT, inside)


def _touch(mark: jax.Ref, slots: list[jax.Array], step: jax.Array, sizes: Sizes) -> None:
    """Mark what is hot. A program with several rounds meets most slots again and looks first.

    It may miss the mark of another program, or of its own, and writes the same once more.
    """
    stale = [slot >= 0 for slot in slots]
    if sizes.look_rounds > 1:
        stale = [gather_slots(mark, slot, slot >= 0) != step for slot in slots]
        stale = [old & (slot >= 0) for old, slot in zip(stale, slots, strict=True)]
    for slot, old in zip(slots, stale, strict=True):
        scatter_slots(mark, slot, step, old)


def _claim(slot_of: Int[Array, "R C"], claim: Int[Array, "R U"]) -> Int[Array, "R C"]:
    """Of the places that claim an entry of the flat map, the first leaves its code there.

    Negative entries count from the end, as everywhere in jnp.
    """
    places = claim.shape[1]
    codes = place_code(jnp.arange(places, dtype=jnp.int32), places)
    codes = jnp.broadcast_to(codes, claim.shape).reshape(-1)
    flat = slot_of.reshape(-1).at[claim.reshape(-1)].min(codes, mode="drop")
    return flat.reshape(slot_of.shape)
