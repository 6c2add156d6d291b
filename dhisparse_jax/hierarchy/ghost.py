"""Ghosts: what one more page would have saved, measured.

Every request remembers, in every pool, which positions were evicted last: a few pages' worth. A
position that is fetched again while it is remembered would have been a hit with those pages more,
so fetches of remembered positions per page and step are the worth of a page. With 4 pages' worth
remembered for 20 steps and 40 of them fetched again, a page would have saved half a fetch per step.

Between measurements a model fills in: the misses of sparse attention go about with the inverse of
the pages held, c / n (the published curve: `bench.traces`), so a page more saves c / (n (n + 1)).

What a release takes away is not remembered: the plan's evictions alone are in the order of use.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.state import Benefit, HierarchyState
from dhisparse_jax.hierarchy.update import with_row
from pallas_kernels.common.ids import NO_SLOT, first_of, masked
from pallas_kernels.plan.types import PlanResult

DECAY = 0.95
"""Weight of the past in moving averages and sums: they look back over some 20 steps."""

PRIOR = 8.0
"""Page-steps of evidence that the prior weighs as much as."""


def remember(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    plan: PlanResult,
    *,
    again: bool,
) -> HierarchyState:
    """Count the ghosts that this step's plan brings back, and add what it evicts.

    A step that plans a pool several times has had its ghosts once, whatever came back how often.

    Args:
        state: the hierarchy after the plan.
        cfg: its sizes; adaptive.
        pool: which pool.
        plan: the plan.
        again: whether it is not the first plan of the pool in this step.
    """
    benefit = state.benefit
    assert benefit.ghost is not None  # the policy is adaptive
    ghost = benefit.ghost[pool]
    slot_of = state.pools[pool].slot_of
    known = ghost >= 0
    # A ghost had no slot, so one that has a slot now has been fetched.
    back = known & (jnp.take_along_axis(slot_of, jnp.maximum(ghost, 0), axis=1) >= 0)
    evicted = plan.fetch_evicted[:, : cfg.ghosts], plan.retire_evicted
    ids = jnp.concatenate([*evicted, masked(ghost, ~back)], axis=1)
    looked, refetched = (seen.sum(axis=1, dtype=jnp.int32) for seen in (known, back))
    if again:
        looked, refetched = benefit.looked[pool], benefit.refetched[pool] + refetched
    benefit = dataclasses.replace(
        benefit,
        ghost=with_row(benefit.ghost, pool, first_of(ids, cfg.ghosts)),
        looked=with_row(benefit.looked, pool, looked),
        refetched=with_row(benefit.refetched, pool, refetched),
    )
    return dataclasses.replace(state, benefit=benefit)


def forget(benefit: Benefit, request: Int[Array, ""]) -> Benefit:
    """Nothing is known of `request`."""
    none = lambda leaf: leaf.at[:, request].set(0)
    ghost = benefit.ghost
    return Benefit(
        ghost=None if ghost is None else ghost.at[:, request].set(NO_SLOT),
        looked=none(benefit.looked),
        refetched=none(benefit.refetched),
        tried=none(benefit.tried),
        saved=none(benefit.saved),
    )


def learn(benefit: Benefit, cfg: HierarchyConfig, took_part: Bool[Array, "pools R"]) -> Benefit:
    """Add the last step to the sums of those who took part in it."""
    looked = benefit.looked.astype(jnp.float32) / cfg.page_slots
    refetched = benefit.refetched.astype(jnp.float32)
    added = lambda past, last: jnp.where(took_part, DECAY * past + last, past)
    return dataclasses.replace(
        benefit, tried=added(benefit.tried, looked), saved=added(benefit.saved, refetched)
    )


def rescaled(
    state: HierarchyState, before: Int[Array, "pools R"], after: Int[Array, "pools R"]
) -> HierarchyState:
    """What was seen with `before` pages, as it would have been with `after`."""
    ratio = before.astype(jnp.float32) / jnp.maximum(after, 1).astype(jnp.float32)
    saved = state.benefit.saved * saved_by_next(before, after)
    benefit = dataclasses.replace(state.benefit, saved=saved)
    return dataclasses.replace(state, benefit=benefit, miss_rate=state.miss_rate * ratio)


def saved_by_next(before: Int[Array, "*n"], after: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """What a page more saves with `after` pages, in units of what it saved with `before`."""
    pair = lambda pages: pages.astype(jnp.float32) * (pages + 1).astype(jnp.float32)
    return pair(before) / jnp.maximum(pair(after), 1.0)


def expected_misses(state: HierarchyState) -> Float[Array, " pools"]:
    """Fetches per step that a newcomer would have with one page: the mean over the requests."""
    at_one_page = state.miss_rate * state.budget.astype(jnp.float32)
    return at_one_page.sum(axis=1) / jnp.maximum(state.active.sum(dtype=jnp.float32), 1.0)


def page_value(state: HierarchyState) -> Float[Array, "pools R"]:
    """Fetches per step that one page more would save: what was seen, and a prior.

    The prior is what the model says of the misses. One fetch more than there was counts in it, so a
    page is never worth nothing.
    """
    prior = (state.miss_rate + (1.0 - DECAY)) / (state.budget + 1).astype(jnp.float32)
    return (state.benefit.saved + PRIOR * prior) / (state.benefit.tried + PRIOR)
