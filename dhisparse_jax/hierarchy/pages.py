"""Pages: granting and releasing them is a table edit, since every record is in the host pool."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.ghost import rescaled
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot, with_pool, with_row
from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, dropping, masked, packed

SURE = 1 << 16
"""The chance 1 that a record is used in the next step, as an integer."""


Lists = tuple[Int[Array, "_ R _"], ...]
"""Page lists, hot pool by hot pool."""


def set_budgets(
    state: HierarchyState, cfg: HierarchyConfig, target: Int[Array, "pools R"]
) -> HierarchyState:
    """Release pages above `target`, then grant pages up to it. No record moves.

    The pages released are those worth least. `target` must fit: its sum over the pools of a hot
    pool is at most the number of its pages.

    Most of the time nothing changes. XLA copies what goes through a branch, if only as it came, so
    that is page lists and owners, and no table as large as the histories. A loop of one round or
    none would copy nothing; but on a GPU it is no part of the graph of a step, and the host waits.
    """
    held = tuple(_page_lists(state, cfg, members) for members in cfg.hot_pools)
    kept, freed, records = lax.cond(
        jnp.any(state.budget > target),
        lambda: _released(state, cfg, held, target),
        lambda: (held, _none_freed(state), state.hot_records),
    )
    state = _forget(dataclasses.replace(state, hot_records=records), cfg, freed)
    lists, owners = lax.cond(
        jnp.any(state.budget < target),
        lambda: _granted(state, cfg, kept, target),
        lambda: (kept, tuple(hot.owner for hot in state.hot)),
    )
    for number, owner in enumerate(owners):
        state = with_hot(state, number, dataclasses.replace(state.hot[number], owner=owner))
        state = _with_page_lists(state, cfg, cfg.hot_pools[number], lists[number])
    return dataclasses.replace(rescaled(state, state.budget, target), budget=target)


def _page_lists(
    state: HierarchyState, cfg: HierarchyConfig, members: tuple[int, ...]
) -> Int[Array, "members R P"]:
    """The page lists of all pools of a hot pool, in one array: one sort is compiled for all."""
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


def _none_freed(state: HierarchyState) -> tuple[Bool[Array, " _"], ...]:
    """No page, by the owners: `jax.shard_map` takes a constant for the same on all devices."""
    return tuple(hot.owner < NO_SLOT for hot in state.hot)


def _released(
    state: HierarchyState, cfg: HierarchyConfig, lists: Lists, target: Int[Array, "pools R"]
) -> tuple[Lists, tuple[Bool[Array, " _"], ...], Int[Array, "pools R"]]:
    """Page lists by worth without what is beyond the target, the pages that were, records left."""
    kept: list[Array] = []
    freed = list(_none_freed(state))
    records = state.hot_records
    for number, members in enumerate(cfg.hot_pools):
        hot, pages = state.hot[number], _by_worth(state, cfg, number, lists[number])
        column = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None]
        over = (column >= target[jnp.array(members)][..., None]) & (pages >= 0)
        gone = dropping(masked(pages, over).reshape(-1), hot.owner.shape[0])
        freed[number] = freed[number].at[gone].set(True, mode="drop")
        content = (hot.position >= 0).reshape(-1, cfg.page_slots).sum(axis=1, dtype=jnp.int32)
        lost = jnp.where(over, content[jnp.maximum(pages, 0)], 0).sum(axis=2, dtype=jnp.int32)
        for member, pool in enumerate(members):
            records = with_row(records, pool, records[pool] - lost[member])
        kept.append(masked(pages, ~over))
    return tuple(kept), tuple(freed), records


def _by_worth(
    state: HierarchyState, cfg: HierarchyConfig, number: int, pages: Int[Array, "members R P"]
) -> Int[Array, "members R P"]:
    """Every page list in the order of worth, most first.

    A page is worth the uses per step that its records can expect, the chance of each taken as the
    inverse of the steps since its last use, in units of 1 / SURE: 16 records used 1 step ago
    outweigh 100 used 10 ago. Integers, so that the order is the same on every device.
    """
    hot = state.hot[number]
    chance = jnp.where(hot.position < 0, 0, SURE // jnp.maximum(state.step - hot.mark, 1))
    worth = chance.reshape(-1, cfg.page_slots).sum(axis=1, dtype=jnp.int32)
    key = jnp.where(pages < 0, INT32_MAX, -worth[jnp.maximum(pages, 0)])
    return jnp.take_along_axis(pages, jnp.argsort(key, axis=2, stable=True), axis=2)


def _forget(
    state: HierarchyState, cfg: HierarchyConfig, freed: tuple[Bool[Array, " _"], ...]
) -> HierarchyState:
    """Nobody has the freed pages, and nothing is in their slots."""
    for number, members in enumerate(cfg.hot_pools):
        hot = state.hot[number]
        owner = masked(hot.owner, ~freed[number])
        position = masked(hot.position, ~jnp.repeat(freed[number], cfg.page_slots))
        state = with_hot(state, number, dataclasses.replace(hot, owner=owner, position=position))
        for pool in members:
            slot_of = state.pools[pool].slot_of
            gone = (slot_of >= 0) & freed[number][jnp.maximum(slot_of, 0) // cfg.page_slots]
            state = with_pool(state, pool, slot_of=masked(slot_of, ~gone))
    return state


def _granted(
    state: HierarchyState, cfg: HierarchyConfig, lists: Lists, target: Int[Array, "pools R"]
) -> tuple[Lists, tuple[Int[Array, " _"], ...]]:
    """Hand out free pages: pool after pool, request after request, lowest page id first.

    With free pages 3, 4, 8 and grants of 1 and 2, the first owner gets 3, the second 4 and 8.
    """
    grown: list[Array] = []
    owners: list[Array] = []
    kept = jnp.minimum(state.budget, target)
    for number, members in enumerate(cfg.hot_pools):
        owner, pages, several = state.hot[number].owner, lists[number], jnp.array(members)
        number_of = jnp.arange(owner.shape[0], dtype=jnp.int32)
        free = packed((owner < 0)[None], number_of[None])[0]
        grants = (target - kept)[several]
        first = (jnp.cumsum(grants) - grants.reshape(-1)).reshape(grants.shape)
        column = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None]
        turn = column - kept[several][..., None]
        new = (turn >= 0) & (turn < grants[..., None])
        granted = masked(free[jnp.clip(first[..., None] + turn, 0, free.shape[0] - 1)], new)
        holder = several[:, None] * cfg.requests + jnp.arange(cfg.requests, dtype=jnp.int32)[None]
        holder = jnp.broadcast_to(holder[..., None], granted.shape).reshape(-1)
        place = dropping(granted.reshape(-1), owner.shape[0])
        owners.append(owner.at[place].set(holder, mode="drop"))
        grown.append(jnp.where(new, granted, pages))
    return tuple(grown), tuple(owners)
