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
    state: HierarchyState,
    cfg: HierarchyConfig,
    target: Int[Array, "pools R"],
    most: int | None = None,
) -> HierarchyState:
    """Release pages above `target`, then grant pages up to it. No record moves.

    The pages released are those worth least; what is left of such a list is in the order of worth.
    `target` must fit: its sum over the pools of a hot pool is at most the number of its pages.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        target: pages of each request and pool.
        most: pages of a hot pool that are released at most, and granted; None: all of them. So much
            work is done, whatever the target says.

    Most of the time nothing changes. XLA copies what goes through a branch, if only as it came, so
    that is page lists and owners, and no table as large as the histories. A loop of one round or
    none would copy nothing; but on a GPU it is no part of the graph of a step, and the host waits.
    """
    held = tuple(_page_lists(state, cfg, members) for members in cfg.hot_pools)
    kept, freed, records = lax.cond(
        jnp.any(state.budget > target),
        lambda: _released(state, cfg, held, target, most),
        lambda: (held, _none_freed(state), state.hot_records),
    )
    state = _forget(dataclasses.replace(state, hot_records=records), cfg, freed)
    lists, owners = lax.cond(
        jnp.any(state.budget < target),
        lambda: _granted(state, cfg, kept, target, most),
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
    state: HierarchyState,
    cfg: HierarchyConfig,
    lists: Lists,
    target: Int[Array, "pools R"],
    most: int | None,
) -> tuple[Lists, tuple[Bool[Array, " _"], ...], Int[Array, "pools R"]]:
    """Page lists without what is beyond the target, the pages that were, and the records left."""
    kept: list[Array] = []
    freed = list(_none_freed(state))
    records = state.hot_records
    for number, members in enumerate(cfg.hot_pools):
        hot, several = state.hot[number], jnp.array(members)
        flat = lists[number].reshape(-1, lists[number].shape[2])
        had, left = (every[several].reshape(-1) for every in (state.budget, target))
        holder = jnp.arange(len(flat), dtype=jnp.int32)
        losers = packed((had > left)[None], holder[None])[0][:most]
        loser = jnp.maximum(losers, 0)
        pages = _by_worth(state, cfg, number, flat[loser])
        column = jnp.arange(flat.shape[1], dtype=jnp.int32)[None]
        over = (losers[:, None] >= 0) & (column >= left[loser][:, None]) & (pages >= 0)
        gone = dropping(masked(pages, over).reshape(-1), hot.owner.shape[0])
        freed[number] = freed[number].at[gone].set(True, mode="drop")
        content = (hot.position >= 0).reshape(-1, cfg.page_slots).sum(axis=1, dtype=jnp.int32)
        lost = jnp.where(over, content[jnp.maximum(pages, 0)], 0).sum(axis=1, dtype=jnp.int32)
        mine = losers[:, None] == holder[None]
        lost = jnp.where(mine, lost[:, None], 0).sum(axis=0).reshape(len(members), -1)
        for member, pool in enumerate(members):
            records = with_row(records, pool, records[pool] - lost[member])
        flat = flat.at[dropping(losers, len(flat))].set(masked(pages, ~over), mode="drop")
        kept.append(flat.reshape(lists[number].shape))
    return tuple(kept), tuple(freed), records


def _by_worth(
    state: HierarchyState, cfg: HierarchyConfig, number: int, pages: Int[Array, "n P"]
) -> Int[Array, "n P"]:
    """Every page list in the order of worth, most first.

    A page is worth the uses per step that its records can expect, the chance of each taken as the
    inverse of the steps since its last use, in units of 1 / SURE: 16 records used 1 step ago
    outweigh 100 used 10 ago. Integers, so that the order is the same on every device.
    """
    hot = state.hot[number]
    chance = jnp.where(hot.position < 0, 0, SURE // jnp.maximum(state.step - hot.mark, 1))
    worth = chance.reshape(-1, cfg.page_slots).sum(axis=1, dtype=jnp.int32)
    key = jnp.where(pages < 0, INT32_MAX, -worth[jnp.maximum(pages, 0)])
    return jnp.take_along_axis(pages, jnp.argsort(key, axis=1, stable=True), axis=1)


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
    state: HierarchyState,
    cfg: HierarchyConfig,
    lists: Lists,
    target: Int[Array, "pools R"],
    most: int | None,
) -> tuple[Lists, tuple[Int[Array, " _"], ...]]:
    """Hand out free pages: pool after pool, request after request, lowest page id first.

    With free pages 3, 4, 8 and grants of 1 and 2, the first owner gets 3, the second 4 and 8: turns
    0, 1 and 2, of which the first ends one and the second three.
    """
    grown: list[Array] = []
    owners: list[Array] = []
    kept = jnp.minimum(state.budget, target)
    for number, members in enumerate(cfg.hot_pools):
        owner, several = state.hot[number].owner, jnp.array(members)
        flat = lists[number].reshape(-1, lists[number].shape[2])
        number_of = jnp.arange(owner.shape[0], dtype=jnp.int32)
        page = packed((owner < 0)[None], number_of[None])[0][:most]
        turn = jnp.arange(page.shape[0], dtype=jnp.int32)
        grants = (target - kept)[several].reshape(-1)
        ends = jnp.cumsum(grants, dtype=jnp.int32)
        who = jnp.searchsorted(ends, turn, side="right", method="scan_unrolled")
        new = (turn < ends[-1]) & (page >= 0)
        taker = jnp.minimum(who, len(flat) - 1)
        column = kept[several].reshape(-1)[taker] + turn - (ends - grants)[taker]
        holder = several[taker // cfg.requests] * cfg.requests + taker % cfg.requests
        place = dropping(masked(page, new), owner.shape[0])
        owners.append(owner.at[place].set(holder, mode="drop"))
        listed = flat.at[jnp.where(new, taker, len(flat)), column].set(page, mode="drop")
        grown.append(listed.reshape(lists[number].shape))
    return tuple(grown), tuple(owners)
