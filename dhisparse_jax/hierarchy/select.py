"""Select: the exact top-K of the whole history for every query.

The index keys never leave the device, so the selection is the same with and without the hierarchy.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.candidates import (
    are_few,
    best_candidates,
    candidate_blocks,
    inside,
)
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.types import Keys
from pallas_kernels.top_k.api import top_k


@pytree
class IndexInputs:
    """What the indexer of a selection group computes from the new tokens.

    Attributes:
        queries: rotated indexer queries.
        weights: float32 weight of each indexer head, with `heads**-0.5 * index**-0.5` applied.
        keys: rotated index keys of the same tokens; with compression, of the records that they can
            complete. None: the records have theirs from the first selection of the group.
        replayed: int32 positions that queries select in place of those that score best, ascending,
            NO_SLOT fills up: what a recording or a trace says. The scores are computed all the
            same. A query whose first one is NO_SLOT selects by its scores. None: all do.
    """

    queries: Float[Array, "R T heads index"]
    weights: Float[Array, "R T heads"]
    keys: Float[Array, "R E index"] | None
    replayed: Int[Array, "R T K"] | None = None


class Selection(NamedTuple):
    """What queries select.

    Attributes:
        records: int32, ascending; NO_SLOT fills up where fewer than K may be selected.
        blocks: int32 numbers of those blocks of records that the other selections of the group
            choose from, ascending, then NO_SLOT; None: all.
    """

    records: Int[Array, "R T K"]
    blocks: Int[Array, "R T N"] | None


Blocks = Int[Array, "R T N"] | None
"""See `Selection.blocks`."""


def select(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    index: IndexInputs,
    live: Int[Array, " R"] | None = None,
    blocks: Blocks = None,
) -> Selection:
    """Selected records of every query, its own included; ties to the lowest position.

    Query t sees positions 0 .. length + t, and the records that they complete; a query of an
    inactive request sees none, and so do queries from `live` on. Scores are float32; NO_SLOT fills
    up where fewer than K are visible. `blocks`, if given, are those of the group's first selection.
    """
    positions = query_positions(state, cfg)
    sees = jnp.broadcast_to(state.active[:, None], positions.shape)
    if live is not None:
        sees &= positions - state.length[:, None] < live[:, None]
    visible = jnp.where(sees, layout.complete(cfg, pool, positions + 1), 0)
    keys = state.pools[pool].index_keys
    found = choose(cfg.geometry, pool, index, keys, visible, blocks)
    if index.replayed is None:
        return found
    given = sees & (index.replayed[..., 0] != NO_SLOT)
    return found._replace(records=jnp.where(given[..., None], index.replayed, found.records))


def choose(
    geometry: Geometry,
    pool: int,
    index: IndexInputs,
    keys: Keys,
    visible: Int[Array, "R T"],
    blocks: Blocks,
) -> Selection:
    """The K best records, and the blocks that other selections of the group choose from.

    Args:
        geometry: of the model.
        pool: which pool.
        index: queries and weights.
        keys: index keys of all records.
        visible: int32, how many records each query sees.
        blocks: those of the group's first selection; None: this is the first.
    """
    rule, given = geometry.candidates_of(pool), (index.queries, index.weights, keys, visible)
    again = rule is not None and blocks is not None
    if again and are_few(rule, index.queries.shape[1], keys.shape[1]):
        return Selection(best_candidates(rule, geometry.top_k, *given, blocks), blocks)
    scores = index_scores(*given)
    if again:
        scores = inside(rule, scores, blocks)
    elif rule is not None:
        blocks = candidate_blocks(rule, scores, visible)
    return Selection(top_k(scores, geometry.top_k), blocks)
