"""Adapt: residency follows the load. A policy is nothing but the budgets it sets.

`resident` and `fixed` give every active request the same pages for its whole life. `adaptive`
divides the same memory anew: an active request always keeps its floor, which covers the working
set; what is above goes where a page saves most fetches.

The value of one more page is estimated as (fetched records per step) / (pages held): the miss curve
of sparse attention is close to a power law of the budget, whose slope is proportional to that.
At most `moves_per_step` pages move per hot pool and step, and a page changes hands only if its new
holder values it `HYSTERESIS` times as much, so residency does not thrash. Free pages also go to
requests that miss nothing yet, so that a history which fits is never evicted in the first place.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import HierarchyState

DECAY = 0.9
"""Weight of the past in the moving average of fetched records per step."""

HYSTERESIS = 2.0

RESERVE_SHARE = 8
"""One page in so many stays free while requests grow, so that a newcomer finds some at once."""

_NEVER = -1.0


def adapt(state: HierarchyState, cfg: HierarchyConfig) -> HierarchyState:
    """Set the budgets of the next step from the load of this one; identity unless `adaptive`."""
    fetched = state.counts.fetched.astype(jnp.float32)
    miss_rate = DECAY * state.miss_rate + (1.0 - DECAY) * fetched
    state = dataclasses.replace(state, miss_rate=jnp.where(state.active[None], miss_rate, 0.0))
    if cfg.policy is not Policy.ADAPTIVE:
        return state
    target = state.budget
    for number, members in enumerate(cfg.hot_pools):
        target = _move_pages(state, cfg, layout.pages(cfg, number), jnp.array(members), target)
    changed = jnp.any(target != state.budget)
    return lax.cond(changed, lambda s: set_budgets(s, cfg, target), lambda s: s, state)


def admission_budgets(
    state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""]
) -> Int[Array, "pools R"]:
    """Budgets that let `request` in: never less than the floor for anybody.

    An adaptive newcomer gets its even share, or what is free if that is more, as far as its history
    can use it; the largest holders shrink to make room.
    """
    if cfg.policy is not Policy.ADAPTIVE:
        return state.budget.at[:, request].set(cfg.floor_pages)
    target = state.budget
    for number, pools in enumerate(cfg.hot_pools):
        members, total = jnp.array(pools), layout.pages(cfg, number)
        free = total - total // RESERVE_SHARE - target[members].sum()
        even = total // (jnp.maximum(state.active.sum(dtype=jnp.int32), 1) * len(pools))
        wish = jnp.minimum(jnp.maximum(even, free // len(pools)), _useful(state, cfg)[request])
        target = target.at[members, request].set(jnp.maximum(wish, cfg.floor_pages))
        target = target.at[members].set(_fit(target[members], state.active, cfg, total))
    return target


def _useful(state: HierarchyState, cfg: HierarchyConfig) -> Int[Array, " R"]:
    """Pages that the history of each request can fill."""
    used = jnp.minimum(state.length + cfg.queries, cfg.capacity)
    return jnp.maximum(-(-used // cfg.page_slots), cfg.floor_pages)


def _fit(
    target: Int[Array, "m R"], active: Bool[Array, " R"], cfg: HierarchyConfig, total: int
) -> Int[Array, "m R"]:
    """Cap the largest holders at one level, the highest that fits into `total` pages.

    Targets 9 5 1 with a floor of 1 and 11 pages: level 5 gives 5 5 1, which fits; level 6 does not.
    """
    floor = jnp.where(active, cfg.floor_pages, 0)[None]
    level = jnp.arange(cfg.max_pages + 1, dtype=jnp.int32)[:, None, None]
    capped = jnp.minimum(target[None], jnp.maximum(floor[None], level))
    fits = capped.sum(axis=(1, 2)) <= total
    best = jnp.where(fits, level[:, 0, 0], 0).max()
    return jnp.minimum(target, jnp.maximum(floor, best))


def _move_pages(
    state: HierarchyState,
    cfg: HierarchyConfig,
    total: int,
    members: Int[Array, " m"],
    budget: Int[Array, "pools R"],
) -> Int[Array, "pools R"]:
    """Up to `moves_per_step` times, one page to whoever values it most.

    It comes from the free pages while there are enough, else from whoever values it least.
    """
    rate = state.miss_rate[members].reshape(-1)
    useful = jnp.tile(_useful(state, cfg), members.shape[0])
    active = jnp.tile(state.active, members.shape[0])
    move = lambda _, held: _move_one(held, rate, useful, active, cfg, total)
    held = lax.fori_loop(0, cfg.moves_per_step, move, budget[members].reshape(-1))
    return budget.at[members].set(held.reshape(members.shape[0], -1))


def _move_one(
    held: Int[Array, " n"],
    rate: Float[Array, " n"],
    useful: Int[Array, " n"],
    active: Bool[Array, " n"],
    cfg: HierarchyConfig,
    total: int,
) -> Int[Array, " n"]:
    value = rate / jnp.maximum(held, 1).astype(jnp.float32)
    wants = jnp.where(active & (held < useful), value, _NEVER)
    taker = jnp.argmax(wants)
    gives = jnp.where(active & (held > cfg.floor_pages), value, jnp.inf)
    giver = jnp.argmin(gives.at[taker].set(jnp.inf))
    free = total - held.sum() > total // RESERVE_SHARE
    trade = gives[giver] * HYSTERESIS < wants[taker]
    grown = held.at[taker].add(1)
    grown = jnp.where(free, grown, grown.at[giver].add(-1))
    return jnp.where((wants[taker] >= 0.0) & (free | trade), grown, held)
