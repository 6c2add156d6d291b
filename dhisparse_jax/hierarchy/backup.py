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
    """Copy the records of positions `start .. length - 1` of every active request to the host.

    From the tail. With compression, those that these positions complete.

    Args:
        state: the hierarchy after `commit`.
        cfg: its sizes.
        start: lengths before the commit, at most T below the lengths after it.
    """
    first, end = (layout.complete(cfg, length)[:, None] for length in (start, state.length))
    position = first + jnp.arange(cfg.fresh, dtype=jnp.int32)[None]
    fresh = state.active[:, None] & (position < end)
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    request = jnp.broadcast_to(request, position.shape)
    rows = layout.host_rows(cfg, state.host_page_of, masked(position, fresh)).reshape(-1)
    pools = range(cfg.pools)
    hosts = backup_op(
        [state.pools[pool].host for pool in pools],
        [state.hot[cfg.hot_pool_of(pool)[0]].slots for pool in pools],
        rows,
        jnp.stack([layout.tail_slot(cfg, pool, request, position).reshape(-1) for pool in pools]),
    )
    for pool, host in enumerate(hosts):
        state = with_pool(state, pool, host=host)
    return state
