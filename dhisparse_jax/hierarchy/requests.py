"""Requests come and go between steps: join, admit the prompt pool by pool, leave.

A request may begin with positions that another one has already: `share_keys` and `recall` bring
what it needs of them, `join` gives it host pages that others have too, and `admit_prompt` leaves
those as they are. A page is in several requests only if all its positions are shared, so nobody
ever writes to it; of a page that is shared in part, the newcomer gets a copy: `recall` reads the
shared records for the prefill, which needs them on the device, and `admit_prompt` writes them, with
the request's own, to a page of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Num

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.adapt import admission_budgets
from dhisparse_jax.hierarchy.formats import StoredKeys, stored_keys
from dhisparse_jax.hierarchy.ghost import expected_misses, forget
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot, with_pool
from pallas_kernels.backup.api import backup as backup_op
from pallas_kernels.common.ids import NO_SLOT, dropping, masked
from pallas_kernels.index_scores.types import ScaledKeys
from pallas_kernels.retrieve.api import retrieve as retrieve_op
from pallas_kernels.retrieve.types import Fetches


def join(
    state: HierarchyState,
    cfg: HierarchyConfig,
    request: Int[Array, ""],
    length: Int[Array, ""],
    host_pages: Int[Array, " N"] | None = None,
) -> HierarchyState:
    """Occupy row `request` with a prompt of `length` positions and give it pages.

    The row must be free. Before the next step, `admit_prompt` must run for every pool.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        request: row of the request.
        length: int32 positions of the prompt.
        host_pages: int32 host pages for all positions that it will ever commit, NO_SLOT after them.
            None: as many as fit its capacity, which are the row's own.

    Raises:
        UserError: the rows have no host pages of their own, since there are too few.
    """
    if host_pages is None:
        host_pages = _own_pages(cfg, request)
    expected = expected_misses(state)
    state = dataclasses.replace(
        state,
        host_page_of=state.host_page_of.at[request].set(host_pages),
        length=state.length.at[request].set(length),
        active=state.active.at[request].set(True),
        benefit=forget(state.benefit, request),
    )
    state = set_budgets(state, cfg, admission_budgets(state, cfg, request))
    # Else the next newcomer would take its pages from this one, which has not missed anything yet.
    rate = expected / jnp.maximum(state.budget[:, request], 1).astype(jnp.float32)
    return dataclasses.replace(state, miss_rate=state.miss_rate.at[:, request].set(rate))


def _own_pages(cfg: HierarchyConfig, request: Int[Array, ""]) -> Int[Array, " N"]:
    if cfg.host_page_count < cfg.requests * cfg.row_pages:
        raise UserError(
            f"{cfg.host_page_count} host pages are not enough for {cfg.requests} rows of "
            f"{cfg.row_pages} each; say which ones a request gets"
        )
    return request * cfg.row_pages + jnp.arange(cfg.row_pages, dtype=jnp.int32)


def share_keys(
    state: HierarchyState,
    cfg: HierarchyConfig,
    request: Int[Array, ""],
    donor: Int[Array, ""],
    count: Int[Array, ""],
) -> HierarchyState:
    """Copy the index keys of the first `count` positions of row `donor` to row `request`.

    From device to device: every step reads the keys of all positions, so each row has its own.
    """
    shared = jnp.arange(cfg.capacity, dtype=jnp.int32) < count

    def copied(keys: Num[Array, "R C *index"]) -> Num[Array, "R C *index"]:
        mask = shared.reshape(-1, *[1] * (keys.ndim - 2))
        # Reading and writing the same keys in one operation could take a copy of all of them.
        mine = lax.optimization_barrier(jnp.where(mask, keys[donor], keys[request]))
        return keys.at[request].set(mine)

    for pool in range(cfg.pools):
        keys = jax.tree.map(copied, state.pools[pool].index_keys)
        state = with_pool(state, pool, index_keys=keys)
    return state


def recall(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    host_pages: Int[Array, " N"],
    count: Int[Array, ""],
    room: Int[Array, "P W"],
) -> Int[Array, "P W"]:
    """Read the first `count` positions that lie in host pages; run it under `jit`.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which pool.
        host_pages: int32 host pages in the order of positions, of a request or not.
        count: int32 positions to read; the time goes with it.
        room: receives position p in row p; the other rows are unchanged.
    """
    position = jnp.arange(cfg.capacity, dtype=jnp.int32)[None]
    rows = layout.host_rows(cfg, host_pages[None], position)
    return retrieve_op(state.pools[pool].host, room, Fetches(rows, position, count[None]))


def leave(state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""]) -> HierarchyState:
    """Free row `request`: its pages come back, its records are forgotten."""
    state = dataclasses.replace(
        state,
        host_page_of=state.host_page_of.at[request].set(NO_SLOT),
        length=state.length.at[request].set(0),
        active=state.active.at[request].set(False),
        miss_rate=state.miss_rate.at[:, request].set(0.0),
        benefit=forget(state.benefit, request),
    )
    return set_budgets(state, cfg, state.budget.at[:, request].set(0))


def admit_prompt(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    request: Int[Array, ""],
    records: Int[Array, "C W"],
    keys: StoredKeys,
    start: Int[Array, ""] | int = 0,
) -> HierarchyState:
    """Store a prefilled prompt in one pool: host records, index keys, tail, and hot slots.

    The newest positions before the tail get the hot slots that the request holds, so that under
    `resident` every position is on the device and none is ever fetched.

    Args:
        state: the hierarchy after `join`, which set the length.
        cfg: its sizes.
        pool: which pool.
        request: row of the request.
        records: records by position; rows at and beyond the length are ignored.
        keys: index keys by position, as they are stored; others are stored now.
        start: int32 positions below are in shared host pages, and not written.
    """
    position = jnp.arange(cfg.capacity, dtype=jnp.int32)
    fresh = masked(position, (position >= start) & (position < state.length[request]))
    (rows,) = layout.host_rows(cfg, state.host_page_of[request][None], fresh[None])
    (host,) = backup_op([state.pools[pool].host], [records], rows, position[None])
    stored = keys if isinstance(keys, ScaledKeys) else stored_keys(cfg.geometry, keys)
    index_keys = jax.tree.map(
        lambda every, mine: every.at[request].set(mine), state.pools[pool].index_keys, stored
    )
    state = with_pool(state, pool, host=host, index_keys=index_keys)
    return _admit_hot(_admit_tail(state, cfg, pool, request, records), cfg, pool, request, records)


def _admit_tail(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    request: Int[Array, ""],
    records: Int[Array, "C W"],
) -> HierarchyState:
    """The newest positions go to the tail ring."""
    number, _ = cfg.hot_pool_of(pool)
    hot = state.hot[number]
    position = state.length[request] - 1 - jnp.arange(cfg.tail, dtype=jnp.int32)
    safe = jnp.maximum(position, 0)
    slot = layout.tail_slot(cfg, pool, jnp.broadcast_to(request, safe.shape), safe)
    slot = dropping(masked(slot, position >= 0), hot.slots.shape[0])
    slots = hot.slots.at[slot].set(records[safe], mode="drop")
    return with_hot(state, number, dataclasses.replace(hot, slots=slots))


def _admit_hot(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    request: Int[Array, ""],
    records: Int[Array, "C W"],
) -> HierarchyState:
    """The newest positions before the tail fill the request's hot slots, oldest first."""
    number, _ = cfg.hot_pool_of(pool)
    hot, mine = state.hot[number], state.pools[pool]
    place = jnp.arange(cfg.max_pages * cfg.page_slots, dtype=jnp.int32)
    page = mine.pages[request][place // cfg.page_slots]
    end = layout.tail_start(cfg, state.length)[request]
    count = jnp.minimum(end, state.budget[pool, request] * cfg.page_slots)
    used = place < count
    position = masked(end - count + place, used)
    slot = masked(page * cfg.page_slots + place % cfg.page_slots, used)
    paged = dropping(slot, hot.position.shape[0])
    safe = jnp.maximum(position, 0)
    whole = dropping(slot, hot.slots.shape[0])
    hot = dataclasses.replace(
        hot,
        slots=hot.slots.at[whole].set(records[safe], mode="drop"),
        position=hot.position.at[paged].set(position, mode="drop"),
        # Position p was written one step before position p + 1: the newest counts as just used.
        mark=hot.mark.at[paged].set(state.step - (end - position), mode="drop"),
    )
    slot_of = mine.slot_of.at[request, dropping(position, cfg.capacity)].set(slot, mode="drop")
    return with_pool(with_hot(state, number, hot), pool, slot_of=slot_of)
