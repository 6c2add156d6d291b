"""Backup: newly committed records to the host pools, so that every committed record is in one."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_pool
from pallas_kernels.backup.api import backup as backup_op
from pallas_kernels.common.ids import masked


def backup(state: HierarchyState, cfg: HierarchyConfig, start: Int[Array, " R"]) -> HierarchyState:
    """Copy the tail records of positions `start .. length - 1` of every active request to the host.

    Args:
        state: the hierarchy after `commit`.
        cfg: its sizes.
        start: lengths before the commit, at most T below the lengths after it.
    """
    position = start[:, None] + jnp.arange(cfg.queries, dtype=jnp.int32)[None]
    fresh = state.active[:, None] & (position < state.length[:, None])
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    request = jnp.broadcast_to(request, position.shape)
    rows = masked(request * cfg.capacity + position, fresh).reshape(-1)
    for pool in range(cfg.pools):
        number, _ = cfg.hot_pool_of(pool)
        source = layout.tail_slot(cfg, pool, request, position).reshape(-1)
        host = backup_op(state.pools[pool].host, state.hot[number].slots, rows, source)
        state = with_pool(state, pool, host=host)
    return state
