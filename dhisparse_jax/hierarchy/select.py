"""Select: the exact top-K of the whole history for every query.

The index keys never leave the device, so the selection is the same with and without the hierarchy.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Candidates, Geometry
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT, dropping
from pallas_kernels.index_scores.api import index_scores
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
        blocks: of the records, which the other selections of the group choose from; None: all.
    """

    records: Int[Array, "R T K"]
    blocks: Bool[Array, "R T B"] | None


Blocks = Bool[Array, "R T B"] | None
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
    scores = index_scores(index.queries, index.weights, keys, visible)
    found = best(cfg.geometry, pool, scores, visible, blocks)
    if index.replayed is None:
        return found
    given = sees & (index.replayed[..., 0] != NO_SLOT)
    return found._replace(records=jnp.where(given[..., None], index.replayed, found.records))


def best(
    geometry: Geometry,
    pool: int,
    scores: Float[Array, "R T C"],
    visible: Int[Array, "R T"],
    blocks: Blocks,
) -> Selection:
    """The K best records, and the blocks that other selections of the group choose from.

    Args:
        geometry: of the model.
        pool: which pool.
        scores: float32; -inf where a record is not visible.
        visible: int32, how many records each query sees.
        blocks: those of the group's first selection; None: this is the first.
    """
    rule = geometry.candidates_of(pool)
    if rule is not None and blocks is None:
        blocks = candidate_blocks(rule, scores, visible)
    elif rule is not None and blocks is not None:
        inside = jnp.repeat(blocks, rule.block, axis=-1)[..., : scores.shape[-1]]
        scores = jnp.where(inside, scores, -jnp.inf)
    return Selection(top_k(scores, geometry.top_k), blocks)


def candidate_blocks(
    rule: Candidates, scores: Float[Array, "R T C"], visible: Int[Array, "R T"]
) -> Bool[Array, "R T B"]:
    """The blocks with the best records, ties to the lowest one, and in any case the newest block.

    Source: DeepSeek-V4.1 (two-level selection).
    """
    short = -scores.shape[-1] % rule.block
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)
    of_block = padded.reshape(*scores.shape[:2], -1, rule.block).max(axis=-1)
    number = jnp.arange(of_block.shape[-1], dtype=jnp.int32)[None, None]
    newest = number == (visible[..., None] - 1) // rule.block
    # Larger than any score of a record, which is a sum of products; NO_SLOT is no newest block.
    of_block = jnp.where(newest & (visible[..., None] > 0), jnp.finfo(jnp.float32).max, of_block)
    chosen = top_k(of_block, min(rule.count, number.shape[-1]))
    row, query = (jnp.arange(size, dtype=jnp.int32) for size in scores.shape[:2])
    at = row[:, None, None], query[None, :, None], dropping(chosen, number.shape[-1])
    return jnp.zeros(of_block.shape, jnp.bool_).at[at].set(True, mode="drop")
