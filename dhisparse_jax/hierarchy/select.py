"""Select: the exact top-K of the whole history for every query.

The index keys never leave the device, so the selection is the same with and without the hierarchy.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.top_k.api import top_k


@pytree
class IndexInputs:
    """What the indexer of a selection group computes from the new tokens.

    Attributes:
        queries: rotated indexer queries.
        weights: float32 weight of each indexer head, with `heads**-0.5 * index**-0.5` applied.
        keys: rotated index keys of the same tokens; with compression, of the records that they can
            complete.
        replayed: int32 positions that queries select in place of those that score best, ascending,
            NO_SLOT fills up: what a recording or a trace says. The scores are computed all the
            same. A query whose first one is NO_SLOT selects by its scores. None: all do.
    """

    queries: Float[Array, "R T heads index"]
    weights: Float[Array, "R T heads"]
    keys: Float[Array, "R E index"]
    replayed: Int[Array, "R T K"] | None = None


def select(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    index: IndexInputs,
    live: Int[Array, " R"] | None = None,
) -> Int[Array, "R T K"]:
    """Selected records of every query, its own included; ties to the lowest position.

    Query t sees positions 0 .. length + t, and the records that they complete; a query of an
    inactive request sees none, and so do queries from `live` on. Scores are float32; NO_SLOT fills
    up where fewer than K are visible.
    """
    positions = query_positions(state, cfg)
    sees = jnp.broadcast_to(state.active[:, None], positions.shape)
    if live is not None:
        sees &= positions - state.length[:, None] < live[:, None]
    visible = jnp.where(sees, layout.complete(cfg, positions + 1), 0)
    keys = state.pools[pool].index_keys
    scores = index_scores(index.queries, index.weights, keys, visible)
    best = top_k(scores, cfg.geometry.top_k)
    if index.replayed is None:
        return best
    given = sees & (index.replayed[..., 0] != NO_SLOT)
    return jnp.where(given[..., None], index.replayed, best)
