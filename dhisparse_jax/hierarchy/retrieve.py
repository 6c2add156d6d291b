"""Retrieve: execute a plan. Each missing record crosses the link once, bit exact."""

import jax.numpy as jnp

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot_slots
from pallas_kernels.common.ids import dropping, masked
from pallas_kernels.plan.types import PlanResult
from pallas_kernels.retrieve.api import retrieve as retrieve_op


def retrieve(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, plan: PlanResult
) -> HierarchyState:
    """Move the retiring tail records to hot slots, then fetch the missing ones from the host."""
    number, _ = cfg.hot_pool_of(pool)
    slots = state.hot[number].slots
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    retire = jnp.maximum(plan.retire_position, 0)
    source = layout.tail_slot(cfg, pool, jnp.broadcast_to(request, retire.shape), retire)
    slots = slots.at[dropping(plan.retire_slot, slots.shape[0])].set(slots[source], mode="drop")
    rows = masked(request * cfg.capacity + plan.fetch_position, plan.fetch_position >= 0)
    host = state.pools[pool].host
    slots = retrieve_op(host, slots, rows.reshape(-1), plan.fetch_slot.reshape(-1))
    return with_hot_slots(state, number, slots)
