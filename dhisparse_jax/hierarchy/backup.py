"""Backup: newly committed positions to host memory, so that every committed record is there.

The index keys go with the records: what is in host memory is all that a request needs to leave the
device and to come back. Decode steps never read them there. They cost the link what is written: for
GLM-5.3, 256 B beside the 2,688 B of a record.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.keys import packed_keys
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_pool
from pallas_kernels.backup.api import backup as backup_op
from pallas_kernels.common.ids import masked


def backup(state: HierarchyState, cfg: HierarchyConfig, start: Int[Array, " R"]) -> HierarchyState:
    """Copy what positions `start .. length - 1` of every active request complete to host memory.

    Args:
        state: the hierarchy after `commit`.
        cfg: its sizes.
        start: lengths before the commit, at most T below the lengths after it.
    """
    by_rate: dict[int, list[int]] = {}
    for pool in range(cfg.pools):
        by_rate.setdefault(cfg.geometry.rate(pool), []).append(pool)
    for pools in by_rate.values():  # one kernel for all pools that complete the same records
        state = _backup(state, cfg, pools, start)
    return state


def _backup(
    state: HierarchyState, cfg: HierarchyConfig, pools: Sequence[int], start: Int[Array, " R"]
) -> HierarchyState:
    """The same of pools with one rate."""
    first, end = (
        layout.complete(cfg, pools[0], length)[:, None] for length in (start, state.length)
    )
    position = first + jnp.arange(cfg.fresh(pools[0]), dtype=jnp.int32)[None]
    fresh = state.active[:, None] & (position < end)
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    request = jnp.broadcast_to(request, position.shape)
    rows = layout.host_rows(cfg, pools[0], state.host_page_of, masked(position, fresh)).reshape(-1)
    slots = [layout.tail_slot(cfg, pool, request, position).reshape(-1) for pool in pools]
    host_keys = [keys for pool in pools if (keys := state.pools[pool].host_keys) is not None]
    keyed = pools if host_keys else ()
    entry = jnp.arange(rows.shape[0], dtype=jnp.int32)
    place = request.reshape(-1), jnp.minimum(position, cfg.records(pools[0]) - 1).reshape(-1)
    keys_of = lambda pool: jax.tree.map(lambda keys: keys[place], state.pools[pool].index_keys)
    written = backup_op(
        [*(state.pools[pool].host for pool in pools), *host_keys],
        [
            *(state.hot[cfg.hot_pool_of(pool)[0]].slots for pool in pools),
            *(packed_keys(keys_of(pool), cfg.record_layout) for pool in keyed),
        ],
        rows,
        jnp.stack([*slots, *[entry] * len(keyed)]),
    )
    for pool, host in zip(pools, written, strict=False):
        state = with_pool(state, pool, host=host)
    for pool, keys in zip(keyed, written[len(pools) :], strict=True):
        state = with_pool(state, pool, host_keys=keys)
    return state
