"""Candidate blocks: what the first selection of a group leaves to the others, which read no more.

The first selection scores all records of a pool, and keeps the blocks with the best ones. Another
selection needs the scores of their records alone: their keys are gathered, those of all queries of
a request once, a piece of blocks at a time, as many pieces as there are blocks to gather. Source of
the rule: DeepSeek-V4.1 (two-level selection).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from dhisparse_jax.geometry import Candidates
from pallas_kernels.common.ids import dropping, masked, packed
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.types import Keys
from pallas_kernels.top_k.api import top_k


def candidate_blocks(
    rule: Candidates, scores: Float[Array, "R T C"], visible: Int[Array, "R T"]
) -> Int[Array, "R T N"]:
    """The blocks with the best records, ties to the lowest one, and in any case the newest block.

    Args:
        rule: how large they are, and how many.
        scores: float32 of all records; -inf where one is not visible.
        visible: int32, how many records each query sees.

    Returns:
        int32 numbers of the blocks, ascending; NO_SLOT at the end.
    """
    short = -scores.shape[-1] % rule.block
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)
    of_block = padded.reshape(*scores.shape[:2], -1, rule.block).max(axis=-1)
    number = jnp.arange(of_block.shape[-1], dtype=jnp.int32)[None, None]
    newest = number == (visible[..., None] - 1) // rule.block
    # Larger than any score of a record, which is a sum of products; NO_SLOT is no newest block.
    of_block = jnp.where(newest & (visible[..., None] > 0), jnp.finfo(jnp.float32).max, of_block)
    return top_k(of_block, min(rule.count, number.shape[-1]))


def are_few(rule: Candidates, queries: int, records: int) -> bool:
    """Whether candidates of so many queries are fewer than all records, even without overlap."""
    return queries * rule.count * rule.block <= records


def inside(
    rule: Candidates, scores: Float[Array, "R T C"], blocks: Int[Array, "R T N"]
) -> Float[Array, "R T C"]:
    """Scores of all records, -inf outside the blocks of each query."""
    count = -(-scores.shape[-1] // rule.block)
    chosen = jnp.repeat(_members(blocks, count), rule.block, axis=-1)[..., : scores.shape[-1]]
    return jnp.where(chosen, scores, -jnp.inf)


def best_candidates(
    rule: Candidates,
    k: int,
    queries: Float[Array, "R T heads index"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    blocks: Int[Array, "R T N"],
) -> Int[Array, "R T K"]:
    """The k best records in the blocks of each query, ties to the lowest; other keys are not read.

    Args:
        rule: how large blocks are.
        k: how many records to select, at most as many as are in the blocks.
        queries: rotated indexer queries.
        weights: float32 weight of each indexer head.
        keys: index keys of the whole history.
        visible: int32, how many records each query sees.
        blocks: int32 numbers of the blocks of each query, ascending; then NO_SLOT.

    Returns:
        int32 records, ascending; NO_SLOT at the end where fewer than k are visible.
    """
    scores = _candidate_scores(rule, queries, weights, keys, visible, blocks)
    found = top_k(scores.reshape(*scores.shape[:2], -1), k)
    block = jnp.take_along_axis(blocks, jnp.maximum(found, 0) // rule.block, axis=-1)
    return masked(block * rule.block + found % rule.block, found >= 0)


def _candidate_scores(
    rule: Candidates,
    queries: Float[Array, "R T heads index"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    blocks: Int[Array, "R T N"],
) -> Float[Array, "R T N block"]:
    """Scores of the records of each query's blocks; -inf where one is not visible."""
    requests, count, most = blocks.shape

    def score(some: Int[Array, "R N"]) -> Float[Array, "R T n"]:
        # In ascending order, what a query sees of gathered records is a first part of them.
        seen = jnp.clip(visible[..., None] - rule.block * some[:, None], 0, rule.block)
        seen = jnp.where(some[:, None] >= 0, seen, 0).sum(axis=-1, dtype=jnp.int32)
        records = _records(rule, some, keys.shape[1])
        gathered = jax.tree.map(lambda leaf: jax.vmap(_take)(leaf, records), keys)
        return index_scores(queries, weights, gathered, seen)

    if count == 1:
        found = score(blocks[:, 0]).reshape(requests, 1, most, rule.block)
        return jnp.where(blocks[..., None] >= 0, found, -jnp.inf)
    members = _members(blocks, -(-keys.shape[1] // rule.block)).any(axis=1)
    place = jnp.cumsum(members, axis=-1, dtype=jnp.int32) - 1
    room = most * count  # at most as many as all blocks: `are_few`
    number = jnp.broadcast_to(jnp.arange(members.shape[1], dtype=jnp.int32), members.shape)
    union = packed(members, number)[:, :room]

    def add(piece: Int[Array, ""], scores: Float[Array, "R T n"]) -> Float[Array, "R T n"]:
        some = lax.dynamic_slice_in_dim(union, piece * most, most, axis=1)
        first = piece * most * rule.block
        return lax.dynamic_update_slice_in_dim(scores, score(some), first, axis=2)

    empty = jnp.full((requests, count, room * rule.block), -jnp.inf, jnp.float32)
    pieces = -(-jnp.max(place[:, -1] + 1) // most)
    scores = lax.fori_loop(0, pieces, add, empty).reshape(requests, count, room, rule.block)
    own = jnp.take_along_axis(place[:, None], jnp.maximum(blocks, 0), axis=-1)
    found = jnp.take_along_axis(scores, own[..., None], axis=2)
    return jnp.where(blocks[..., None] >= 0, found, -jnp.inf)


def _records(rule: Candidates, blocks: Int[Array, "R N"], count: int) -> Int[Array, "R n"]:
    """Records of blocks, in order; any of all `count` for no block, and beyond the last record."""
    within = jnp.arange(rule.block, dtype=jnp.int32).reshape(1, 1, -1)
    records = jnp.clip(blocks[..., None] * rule.block + within, 0, count - 1)
    return records.reshape(blocks.shape[0], -1)


def _take(leaf: Shaped[Array, "C *width"], records: Int[Array, " n"]) -> Shaped[Array, "n *width"]:
    return jnp.take(leaf, records, axis=0)


def _members(blocks: Int[Array, "R T N"], count: int) -> Bool[Array, "R T B"]:
    """Which of `count` blocks each query has."""
    row, query = (jnp.arange(size, dtype=jnp.int32) for size in blocks.shape[:2])
    at = row[:, None, None], query[None, :, None], dropping(blocks, count)
    return jnp.zeros((*blocks.shape[:2], count), jnp.bool_).at[at].set(True, mode="drop")
