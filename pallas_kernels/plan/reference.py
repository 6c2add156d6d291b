"""Exact plan in plain jnp: one sort of the selection, one top-k over the request's own slots."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, dropping, masked, packed
from pallas_kernels.plan.types import PlanCounts, PlanInput, PlanResult, PlanTables


class _Union(NamedTuple):
    """Each distinct position where it is selected first, else NO_SLOT.

    `first` leads from each selected position to that place.
    """

    position: Int[Array, "R U"]
    tail_slot: Int[Array, "R U"]
    first: Int[Array, "R U"]


def plan(
    wanted: PlanInput, tables: PlanTables, *, page_slots: int
) -> tuple[PlanResult, PlanTables]:
    """See `api.plan`."""
    wanted = _within(wanted, tables.slot_of.shape[1])
    union = _union(wanted.selection, _tail_slots(wanted))
    hot = _look_up(tables.slot_of, union.position)
    hit = hot >= 0
    tail = ~hit & (union.tail_slot >= 0)
    miss = (union.position >= 0) & ~hit & ~tail
    tables = _touch(tables, masked(hot, hit), wanted.step)
    missing = miss.sum(axis=1, dtype=jnp.int32)
    retire = (wanted.retiring >= 0) & (_look_up(tables.slot_of, wanted.retiring) < 0)
    needed = missing + retire.sum(axis=1, dtype=jnp.int32)
    victims = _victims(tables, wanted, page_slots, needed)
    fetch_hot = _assign(miss, victims, 0)
    overflow = miss & (fetch_hot < 0)
    fetch_slot = jnp.where(overflow, _assign(overflow, wanted.staging, 0), fetch_hot)
    retire_slot = _assign(retire, victims, missing)
    retire_position = masked(wanted.retiring, retire_slot >= 0)
    filled = jnp.concatenate([masked(union.position, fetch_hot >= 0), retire_position], axis=1)
    held = lambda slot: masked(tables.position[jnp.maximum(slot, 0)], slot >= 0)
    fetch_evicted, retire_evicted = held(fetch_hot), held(retire_slot)
    evicted = jnp.concatenate([fetch_evicted, retire_evicted], axis=1)
    slots = jnp.concatenate([fetch_hot, retire_slot], axis=1)
    after = _fill(tables, slots, filled, evicted, wanted.step)
    place = jnp.where(hit, hot, jnp.where(tail, union.tail_slot, fetch_slot))
    location = jnp.take_along_axis(place, union.first, axis=1).reshape(wanted.selection.shape)
    result = PlanResult(
        location=masked(location, wanted.selection >= 0),
        fetch_position=packed(miss, union.position),
        fetch_slot=packed(miss, fetch_slot),
        fetch_evicted=packed(miss, fetch_evicted),
        retire_position=retire_position,
        retire_slot=retire_slot,
        retire_evicted=retire_evicted,
        held=_held(after, wanted, page_slots),
        counts=_counts(union.position >= 0, hit, tail, miss, overflow),
    )
    return result, after


def _within(wanted: PlanInput, capacity: int) -> PlanInput:
    """Positions outside the table are none."""
    within = lambda position: masked(position, (position >= 0) & (position < capacity))
    return wanted._replace(selection=within(wanted.selection), retiring=within(wanted.retiring))


def _tail_slots(wanted: PlanInput) -> Int[Array, "R T K"]:
    """Slot of each selected position in the tail, NO_SLOT if it is not there."""
    position, (start, first, length) = wanted.selection, wanted.tail
    in_tail = (position >= 0) & (position >= start[:, None, None])
    return masked(first[:, None, None] + jnp.maximum(position, 0) % length, in_tail)


def _union(selection: Int[Array, "R T K"], tail_slot: Int[Array, "R T K"]) -> _Union:
    """Distinct positions of all queries.

    In:  selection [[5, 2], [2, -1]]        flat 5 2 2 -1; sorted 2 2 5 -1, from places 1 2 0 3
    Out: position  5 2 -1 -1                first 0 1 1 3
    """
    flat = selection.reshape(selection.shape[0], -1)
    order = jnp.argsort(jnp.where(flat < 0, INT32_MAX, flat), axis=1, stable=True)
    ranked = jnp.take_along_axis(flat, order, axis=1)
    before = jnp.pad(ranked[:, :-1], ((0, 0), (1, 0)), constant_values=NO_SLOT)
    here = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32), flat.shape)
    leader = lax.cummax(jnp.where((ranked < 0) | (ranked != before), here, 0), axis=1)
    place = jnp.take_along_axis(order, leader, axis=1).astype(jnp.int32)
    first = jnp.put_along_axis(jnp.zeros_like(here), order, place, axis=1, inplace=False)
    leads = (flat >= 0) & (first == here)
    return _Union(masked(flat, leads), masked(tail_slot.reshape(flat.shape), leads), first)


def _look_up(slot_of: Int[Array, "R C"], position: Int[Array, "R n"]) -> Int[Array, "R n"]:
    """Hot slot of each position, NO_SLOT for NO_SLOT."""
    slots = jnp.take_along_axis(slot_of, jnp.maximum(position, 0), axis=1)
    return masked(slots, position >= 0)


def _touch(tables: PlanTables, slots: Int[Array, "R n"], step: Int[Array, ""]) -> PlanTables:
    """Mark the slots as used in this step, which also protects them from eviction."""
    mark = tables.mark.at[dropping(slots, tables.mark.shape[0])].set(step, mode="drop")
    return tables._replace(mark=mark)


def _owned(wanted: PlanInput, page_slots: int) -> Int[Array, "R n"]:
    """The slots of the request's pages in the order of the page list; NO_SLOT for no page."""
    pages = wanted.pages[:, :, None]
    offsets = jnp.arange(page_slots, dtype=jnp.int32)[None, None]
    owned = jnp.where(pages < 0, NO_SLOT, pages * page_slots + offsets)
    return owned.reshape(pages.shape[0], -1)


def _held(tables: PlanTables, wanted: PlanInput, page_slots: int) -> Int[Array, " R"]:
    owned = _owned(wanted, page_slots)
    return (masked(tables.position[owned], owned >= 0) >= 0).sum(axis=1, dtype=jnp.int32)


def _victims(
    tables: PlanTables, wanted: PlanInput, page_slots: int, needed: Int[Array, " R"]
) -> Int[Array, "R n"]:
    """The request's slots to overwrite: empty ones, then the longest unused, by page list."""
    _, queries, k = wanted.selection.shape
    owned = _owned(wanted, page_slots)
    safe = jnp.maximum(owned, 0)
    age = jnp.where(tables.position[safe] < 0, INT32_MAX, wanted.step - tables.mark[safe])
    age = jnp.where(owned >= 0, age, 0)  # age 0: in the working set, or not the request's
    most = min(queries * k + wanted.retiring.shape[1], owned.shape[1])
    best, index = lax.top_k(age, most)
    chosen = (best > 0) & (jnp.arange(most, dtype=jnp.int32)[None] < needed[:, None])
    index = jnp.sort(jnp.where(chosen, index, INT32_MAX), axis=1)
    victims = jnp.take_along_axis(owned, jnp.minimum(index, owned.shape[1] - 1), axis=1)
    return masked(victims, index < INT32_MAX)


def _assign(
    need: Bool[Array, "R n"], places: Int[Array, "R v"], skip: int | Int[Array, " R"]
) -> Int[Array, "R n"]:
    """The i-th needy entry of each request gets place number `skip + i`, while they last.

    In:  need [1 0 1 1], places [7 9], skip 0
    Out: [7 -1 9 -1]
    """
    if places.shape[1] == 0:
        return jnp.full(need.shape, NO_SLOT, jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(skip, jnp.int32), need.shape[:1])[:, None]
    rank = jnp.cumsum(need, axis=1, dtype=jnp.int32) - 1 + first
    place = jnp.take_along_axis(places, jnp.clip(rank, 0, places.shape[1] - 1), axis=1)
    return masked(place, need & (rank < places.shape[1]))


def _fill(
    tables: PlanTables,
    slots: Int[Array, "R n"],
    positions: Int[Array, "R n"],
    evicted: Int[Array, "R n"],
    step: Int[Array, ""],
) -> PlanTables:
    """Put `positions` into `slots`: forget what the slots held, then record the new content."""
    requests, capacity = tables.slot_of.shape
    row = jnp.broadcast_to(jnp.arange(requests, dtype=jnp.int32)[:, None], slots.shape)
    size = tables.position.shape[0]
    slot_of = tables.slot_of.at[row, dropping(evicted, capacity)].set(NO_SLOT, mode="drop")
    slot_of = slot_of.at[row, dropping(positions, capacity)].set(slots, mode="drop")
    position = tables.position.at[dropping(slots, size)].set(positions, mode="drop")
    tables = tables._replace(slot_of=slot_of, position=position)
    return _touch(tables, slots, step)


def _counts(
    selected: Bool[Array, "R U"],
    hit: Bool[Array, "R U"],
    tail: Bool[Array, "R U"],
    miss: Bool[Array, "R U"],
    staged: Bool[Array, "R U"],
) -> PlanCounts:
    return PlanCounts(
        *(x.sum(axis=1, dtype=jnp.int32) for x in (selected, hit, tail, miss, staged))
    )
