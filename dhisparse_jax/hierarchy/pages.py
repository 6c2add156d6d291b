"""Pages: granting and releasing them is a table edit, since every record is in the host pool."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.ghost import rescaled
from dhisparse_jax.hierarchy.state import HierarchyState, HotPool
from dhisparse_jax.hierarchy.update import with_hot, with_pool, with_row
from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, dropping, masked, packed

SURE = 1 << 16
"""The chance 1 that a record is used in the next step, as an integer."""


class _Tables(NamedTuple):
    """What releasing and granting pages change: tables, and no record."""

    pages: tuple[Int[Array, "R _"], ...]
    slot_of: tuple[Int[Array, "R _"], ...]
    owner: tuple[Int[Array, " _"], ...]
    position: tuple[Int[Array, " _"], ...]
    hot_records: Int[Array, "pools R"]
    budget: Int[Array, "pools R"]


def set_budgets(
    state: HierarchyState, cfg: HierarchyConfig, target: Int[Array, "pools R"]
) -> HierarchyState:
    """Release pages above `target`, then grant pages up to it. No record moves.

    The pages released are those worth least. `target` must fit: its sum over the pools of a hot
    pool is at most the number of its pages.

    Most of the time nothing changes, and then it costs nothing: both are loops of one round or
    none. A loop updates its tables in place, where XLA copies all that goes through a branch.
    """

    def release(tables: _Tables) -> _Tables:
        now = _with_tables(state, tables)
        for number, members in enumerate(cfg.hot_pools):
            now = _release(_rank(now, cfg, number, members), cfg, number, members, target)
        return _tables(dataclasses.replace(now, budget=jnp.minimum(now.budget, target)))

    def grant(tables: _Tables) -> _Tables:
        now = _with_tables(state, tables)
        for number, members in enumerate(cfg.hot_pools):
            now = _grant(now, cfg, number, members, target)
        return _tables(dataclasses.replace(now, budget=target))

    tables = lax.while_loop(lambda now: jnp.any(now.budget > target), release, _tables(state))
    tables = lax.while_loop(lambda now: jnp.any(now.budget < target), grant, tables)
    return rescaled(_with_tables(state, tables), state.budget, target)


def _tables(state: HierarchyState) -> _Tables:
    return _Tables(
        pages=tuple(pool.pages for pool in state.pools),
        slot_of=tuple(pool.slot_of for pool in state.pools),
        owner=tuple(hot.owner for hot in state.hot),
        position=tuple(hot.position for hot in state.hot),
        hot_records=state.hot_records,
        budget=state.budget,
    )


def _with_tables(state: HierarchyState, tables: _Tables) -> HierarchyState:
    for pool, (pages, slot_of) in enumerate(zip(tables.pages, tables.slot_of, strict=True)):
        state = with_pool(state, pool, pages=pages, slot_of=slot_of)
    for number, (owner, position) in enumerate(zip(tables.owner, tables.position, strict=True)):
        hot = dataclasses.replace(state.hot[number], owner=owner, position=position)
        state = with_hot(state, number, hot)
    return dataclasses.replace(state, hot_records=tables.hot_records, budget=tables.budget)


def _rank(
    state: HierarchyState, cfg: HierarchyConfig, number: int, members: tuple[int, ...]
) -> HierarchyState:
    """Order the page list of every request by worth, most first.

    A page is worth the uses per step that its records can expect, the chance of each taken as the
    inverse of the steps since its last use, in units of 1 / SURE: 16 records used 1 step ago
    outweigh 100 used 10 ago. Integers, so that the order is the same on every device.
    """
    hot = state.hot[number]
    chance = jnp.where(hot.position < 0, 0, SURE // jnp.maximum(state.step - hot.mark, 1))
    worth = chance.reshape(-1, cfg.page_slots).sum(axis=1, dtype=jnp.int32)
    pages = _page_lists(state, cfg, members)
    key = jnp.where(pages < 0, INT32_MAX, -worth[jnp.maximum(pages, 0)])
    order = jnp.argsort(key, axis=2, stable=True)
    return _with_page_lists(state, cfg, members, jnp.take_along_axis(pages, order, axis=2))


def _page_lists(
    state: HierarchyState, cfg: HierarchyConfig, members: tuple[int, ...]
) -> Int[Array, "members R P"]:
    """The page lists of all pools of a hot pool: one sort is compiled sooner than many."""
    widest = max(cfg.max_pages(pool) for pool in members)
    more = lambda pool: ((0, 0), (0, widest - cfg.max_pages(pool)))
    lists = [jnp.pad(state.pools[p].pages, more(p), constant_values=NO_SLOT) for p in members]
    return jnp.stack(lists)


def _with_page_lists(
    state: HierarchyState,
    cfg: HierarchyConfig,
    members: tuple[int, ...],
    pages: Int[Array, "members R P"],
) -> HierarchyState:
    for member, pool in enumerate(members):
        state = with_pool(state, pool, pages=pages[member, :, : cfg.max_pages(pool)])
    return state


def _release(
    state: HierarchyState,
    cfg: HierarchyConfig,
    number: int,
    members: tuple[int, ...],
    target: Int[Array, "pools R"],
) -> HierarchyState:
    """Free every page beyond the target and forget what its slots held."""
    pages = _page_lists(state, cfg, members)
    column = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None]
    over = (column >= target[jnp.array(members)][..., None]) & (pages >= 0)
    freed = jnp.zeros(state.hot[number].owner.shape, jnp.bool_)
    gone = dropping(masked(pages, over).reshape(-1), freed.shape[0])
    freed = freed.at[gone].set(True, mode="drop")
    state = _with_page_lists(state, cfg, members, masked(pages, ~over))
    slot_freed, held = jnp.repeat(freed, cfg.page_slots), state.hot_records
    for pool in members:
        slot_of = state.pools[pool].slot_of
        gone = (slot_of >= 0) & slot_freed[jnp.maximum(slot_of, 0)]
        state = with_pool(state, pool, slot_of=masked(slot_of, ~gone))
        held = with_row(held, pool, held[pool] - gone.sum(axis=1, dtype=jnp.int32))
    state = dataclasses.replace(state, hot_records=held)
    return with_hot(state, number, _forget(state.hot[number], freed, slot_freed))


def _forget(
    hot: HotPool, freed: Bool[Array, " P"], slot_freed: Bool[Array, " page_slots"]
) -> HotPool:
    return dataclasses.replace(
        hot, owner=masked(hot.owner, ~freed), position=masked(hot.position, ~slot_freed)
    )


def _grant(
    state: HierarchyState,
    cfg: HierarchyConfig,
    number: int,
    members: tuple[int, ...],
    target: Int[Array, "pools R"],
) -> HierarchyState:
    """Hand out free pages: request after request, pool after pool, lowest page id first.

    With free pages 3, 4, 8 and grants of 1 and 2, the first owner gets 3, the second 4 and 8.
    """
    owner = state.hot[number].owner
    number_of = jnp.arange(owner.shape[0], dtype=jnp.int32)
    free = packed((owner < 0)[None], number_of[None])[0]
    held = state.budget[jnp.array(members)]
    grants = target[jnp.array(members)] - held
    first = (jnp.cumsum(grants) - grants.reshape(-1)).reshape(grants.shape)
    pages = _page_lists(state, cfg, members)
    column = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None]
    turn = column - held[..., None]
    new = (turn >= 0) & (turn < grants[..., None])
    granted = masked(free[jnp.clip(first[..., None] + turn, 0, free.shape[0] - 1)], new)
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[None]
    holder = jnp.array(members)[:, None] * cfg.requests + request
    holder = jnp.broadcast_to(holder[..., None], granted.shape).reshape(-1)
    place = dropping(granted.reshape(-1), owner.shape[0])
    owner = owner.at[place].set(holder, mode="drop")
    state = _with_page_lists(state, cfg, members, jnp.where(new, granted, pages))
    return with_hot(state, number, dataclasses.replace(state.hot[number], owner=owner))
