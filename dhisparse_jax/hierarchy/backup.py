"""Backup: newly committed positions to host memory, so that every committed record is there.

The index keys go with the records: what is in host memory is all that a request needs to leave the
device and to come back. Decode steps never read them there. They cost the link what is written: for
GLM-5.3, 256 B beside the 2,688 B of a record.
"""

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
    first, end = (layout.complete(cfg, length)[:, None] for length in (start, state.length))
    position = first + jnp.arange(cfg.fresh, dtype=jnp.int32)[None]
    fresh = state.active[:, None] & (position < end)
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    request = jnp.broadcast_to(request, position.shape)
    rows = layout.host_rows(cfg, state.host_page_of, masked(position, fresh)).reshape(-1)
    slots = [
        layout.tail_slot(cfg, pool, request, position).reshape(-1) for pool in range(cfg.pools)
    ]
    keyed = range(cfg.pools if cfg.key_words else 0)
    entry = jnp.arange(rows.shape[0], dtype=jnp.int32)
    place = request.reshape(-1), jnp.minimum(position, cfg.records - 1).reshape(-1)
    written = backup_op(
        [*(pool.host for pool in state.pools), *(state.pools[pool].host_keys for pool in keyed)],
        [
            *(state.hot[cfg.hot_pool_of(pool)[0]].slots for pool in range(cfg.pools)),
            *(
                packed_keys(
                    jax.tree.map(lambda keys: keys[place], state.pools[pool].index_keys),
                    cfg.key_words,
                )
                for pool in keyed
            ),
        ],
        rows,
        jnp.stack([*slots, *[entry] * len(keyed)]),
    )
    for pool in range(cfg.pools):
        state = with_pool(state, pool, host=written[pool])
    for pool in keyed:
        state = with_pool(state, pool, host_keys=written[cfg.pools + pool])
    return state
