"""Retrieve: execute a plan. Each missing record crosses the link once, bit exact."""

import jax.numpy as jnp

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot_slots
from pallas_kernels.common.ids import masked
from pallas_kernels.plan.types import PlanResult
from pallas_kernels.retrieve.api import retrieve as retrieve_op
from pallas_kernels.retrieve.types import Fetches, Moves


def retrieve(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, plan: PlanResult
) -> HierarchyState:
    """Fetch the missing records from the host, and move the retiring tail records to hot slots.

    A retiring record is read from the tail, which is no target of a plan.
    """
    number, _ = cfg.hot_pool_of(pool)
    retiring = plan.retire_position
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    request = jnp.broadcast_to(request, retiring.shape)
    tail = layout.tail_slot(cfg, pool, request, jnp.maximum(retiring, 0))
    slots = retrieve_op(
        state.pools[pool].host,
        state.hot[number].slots,
        Fetches(plan.fetch_position, plan.fetch_slot, plan.counts.fetched),
        Moves(masked(tail, retiring >= 0).reshape(-1), plan.retire_slot.reshape(-1)),
    )
    return with_hot_slots(state, number, slots)
