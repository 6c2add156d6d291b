"""Requests come and go between steps: join, admit the prompt pool by pool, leave."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.adapt import admission_budgets
from dhisparse_jax.hierarchy.ghost import expected_misses, forget
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot, with_pool
from pallas_kernels.backup.api import backup as backup_op
from pallas_kernels.common.ids import dropping, masked


def join(
    state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""], length: Int[Array, ""]
) -> HierarchyState:
    """Occupy row `request` with a prompt of `length` positions and give it pages.

    The row must be free. Before the next step, `admit_prompt` must run for every pool.
    """
    expected = expected_misses(state)
    state = dataclasses.replace(
        state,
        length=state.length.at[request].set(length),
        active=state.active.at[request].set(True),
        benefit=forget(state.benefit, request),
    )
    state = set_budgets(state, cfg, admission_budgets(state, cfg, request))
    # Else the next newcomer would take its pages from this one, which has not missed anything yet.
    rate = expected / jnp.maximum(state.budget[:, request], 1).astype(jnp.float32)
    return dataclasses.replace(state, miss_rate=state.miss_rate.at[:, request].set(rate))


def leave(state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""]) -> HierarchyState:
    """Free row `request`: its pages come back, its records are forgotten."""
    state = dataclasses.replace(
        state,
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
    keys: Float[Array, "C index"],
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
        keys: index keys by position.
    """
    position = jnp.arange(cfg.capacity, dtype=jnp.int32)
    length = state.length[request]
    rows = masked(request * cfg.capacity + position, position < length)
    (host,) = backup_op([state.pools[pool].host], [records], rows, position[None])
    index_keys = state.pools[pool].index_keys
    index_keys = index_keys.at[request].set(keys.astype(index_keys.dtype))
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
