"""Plan: where each selected record is, and what to fetch into which slot."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.ghost import remember
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot, with_pool, with_row
from pallas_kernels.common.ids import NO_SLOT, masked
from pallas_kernels.plan.api import plan as plan_op
from pallas_kernels.plan.types import PlanCounts, PlanInput, PlanResult, PlanTables, Tail


def plan(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    selection: Int[Array, "R T K"],
    *,
    again: bool = False,
) -> tuple[PlanResult, HierarchyState]:
    """Plan one pool for one step and update its tables; records move in `retrieve`.

    Contract of the algorithm: `pallas_kernels.plan.api.plan`. The working set is protected, a miss
    without a hot slot gets a staging slot, and no selected position is dropped.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which pool.
        selection: int32 selected records.
        again: whether the step has attended to another selection from this pool. The clock goes
            on, so that what was selected before is no longer protected.
    """
    if again:
        state = dataclasses.replace(state, step=state.step + 1)
    wanted = plan_input(state, cfg, pool, selection, again=again)
    result, after = plan_op(wanted, plan_tables(state, cfg, pool), page_slots=cfg.page_slots)
    return result, finish_plan(state, cfg, pool, result, after, again=again)


def plan_input(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    selection: Int[Array, "R T K"],
    *,
    again: bool = False,
) -> PlanInput:
    """What one step wants from one pool. What retires has done so before it selects again."""
    retiring = _retiring(state, cfg, pool)
    return PlanInput(
        selection=selection,
        tail=_tail(state, cfg, pool),
        retiring=jnp.full_like(retiring, NO_SLOT) if again else retiring,
        staging=layout.staging_slots(cfg, pool),
        pages=state.pools[pool].pages,
        step=state.step,
    )


def plan_tables(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> PlanTables:
    """The tables of one pool."""
    hot = state.hot[cfg.hot_pool_of(pool)[0]]
    return PlanTables(state.pools[pool].slot_of, hot.position, hot.mark)


def finish_plan(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    result: PlanResult,
    after: PlanTables,
    *,
    again: bool = False,
) -> HierarchyState:
    """The state with the tables after a plan, and what the plans of the step say of the load."""
    number, _ = cfg.hot_pool_of(pool)
    hot = dataclasses.replace(state.hot[number], position=after.position, mark=after.mark)
    state = with_pool(with_hot(state, number, hot), pool, slot_of=after.slot_of)
    held = with_row(state.hot_records, pool, result.held)
    state = dataclasses.replace(_count(state, pool, result.counts, again=again), hot_records=held)
    if not cfg.ghosts:
        return state
    return remember(state, cfg, pool, result, again=again)


def _tail(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> Tail:
    """Where the newest positions are."""
    request = jnp.arange(cfg.requests, dtype=jnp.int32)
    return Tail(
        start=layout.tail_start(cfg, pool, state.length),
        first=layout.tail_slot(cfg, pool, request, jnp.zeros_like(request)),
        length=jnp.int32(cfg.tail),
    )


def _retiring(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> Int[Array, "R E"]:
    """Records that the next append may overwrite in the tail: as many as one step can complete.

    They are committed (the tail is at least 2 T long), so they go to the hot pool from the device.
    """
    fresh = cfg.fresh(pool)
    first = layout.complete(cfg, pool, state.length) + fresh - cfg.tail
    position = first[:, None] + jnp.arange(fresh, dtype=jnp.int32)[None]
    return masked(position, state.active[:, None] & (position >= 0))


def _count(state: HierarchyState, pool: int, counts: PlanCounts, *, again: bool) -> HierarchyState:
    if again:
        counts = PlanCounts(
            *(every[pool] + new for every, new in zip(state.counts, counts, strict=True))
        )
    pairs = zip(state.counts, counts, strict=True)
    return dataclasses.replace(
        state, counts=PlanCounts(*(with_row(every, pool, new) for every, new in pairs))
    )
