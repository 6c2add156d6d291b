"""Plan: where each selected record is, and what to fetch into which slot."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.ghost import remember
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot, with_pool, with_row
from pallas_kernels.common.ids import masked
from pallas_kernels.plan.api import plan as plan_op
from pallas_kernels.plan.types import PlanCounts, PlanInput, PlanResult, PlanTables, Tail


def plan(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, selection: Int[Array, "R T K"]
) -> tuple[PlanResult, HierarchyState]:
    """Plan one pool for one step and update its tables; records move in `retrieve`.

    Contract of the algorithm: `pallas_kernels.plan.api.plan`. The working set is protected, a miss
    without a hot slot gets a staging slot, and no selected position is dropped.
    """
    wanted, tables = plan_input(state, cfg, pool, selection), plan_tables(state, cfg, pool)
    result, after = plan_op(wanted, tables, page_slots=cfg.page_slots)
    return result, finish_plan(state, cfg, pool, result, after)


def plan_input(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, selection: Int[Array, "R T K"]
) -> PlanInput:
    """What one step wants from one pool."""
    return PlanInput(
        selection=selection,
        tail=_tail(state, cfg, pool),
        retiring=_retiring(state, cfg),
        staging=layout.staging_slots(cfg, pool),
        pages=state.pools[pool].pages,
        step=state.step,
    )


def plan_tables(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> PlanTables:
    """The tables of one pool."""
    hot = state.hot[cfg.hot_pool_of(pool)[0]]
    return PlanTables(state.pools[pool].slot_of, hot.position, hot.mark)


def finish_plan(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, result: PlanResult, after: PlanTables
) -> HierarchyState:
    """The state with the tables after a plan, and what the plan says of the load."""
    number, _ = cfg.hot_pool_of(pool)
    before = state.hot[number]
    hot = dataclasses.replace(before, position=after.position, mark=after.mark)
    state = with_pool(with_hot(state, number, hot), pool, slot_of=after.slot_of)
    state = _count(state, pool, result.counts)
    return remember(state, cfg, pool, result, before.position) if cfg.ghosts else state


def _tail(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> Tail:
    """Where the newest positions are."""
    request = jnp.arange(cfg.requests, dtype=jnp.int32)
    return Tail(
        start=layout.tail_start(cfg, state.length),
        first=layout.tail_slot(cfg, pool, request, jnp.zeros_like(request)),
        length=jnp.int32(cfg.tail),
    )


def _retiring(state: HierarchyState, cfg: HierarchyConfig) -> Int[Array, "R T"]:
    """Positions that the next append may overwrite in the tail: the T oldest that it holds.

    They are committed (the tail is at least 2 T long), so they go to the hot pool from the device.
    """
    first = state.length + cfg.queries - cfg.tail
    position = first[:, None] + jnp.arange(cfg.queries, dtype=jnp.int32)[None]
    return masked(position, state.active[:, None] & (position >= 0))


def _count(state: HierarchyState, pool: int, counts: PlanCounts) -> HierarchyState:
    pairs = zip(state.counts, counts, strict=True)
    return dataclasses.replace(
        state, counts=PlanCounts(*(with_row(every, pool, new) for every, new in pairs))
    )
