"""Attention of a whole text over the positions that a mask shows, block by block.

Nothing of the size `heads x text x text` is ever kept, and blocks that show nothing cost nothing:
causal attention is half the work, and a window next to none. Softmax is carried from block to block
by its maximum and its sum (Milakov and Gimelshein, arXiv 1805.02867). No gradients.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.models.glm.attend import select_top_k
from dhisparse_jax.models.llama.model import Heads

QUERIES, KEYS = 256, 512
"""Sizes of a block; a text is padded to a multiple of both."""

Seen = Bool[Array, "s s"]
"""Which positions (second axis) each query (first axis) attends to."""


class _Running(NamedTuple):
    """Softmax over the blocks so far: the largest logit, the sum of weights, and of values."""

    largest: Float[Array, "kv_heads group queries"]
    total: Float[Array, "kv_heads group queries"]
    values: Float[Array, "kv_heads group queries head"]


def masked_attention(heads: Heads, seen: Seen, scale: float) -> Float[Array, "s heads head"]:
    """Attention of one text. Every query must see some position up to its own.

    Products take operands of the dtype of `heads`; logits, weights and sums are float32.

    Args:
        heads: Queries, keys and values `[s, heads, head]`.
        seen: What each query sees; nothing after itself.
        scale: Factor on the products of queries and keys.
    """
    size, kv_heads = heads.keys.shape[:2]
    padded = -(-size // KEYS) * KEYS
    rows = ((0, padded - size), (0, 0), (0, 0))
    queries, keys, values = (jnp.pad(x, rows) for x in heads)
    seen = jnp.pad(seen, ((0, padded - size), (0, padded - size)))
    queries = queries.reshape(-1, QUERIES, kv_heads, *_group(heads))
    keys, values = (x.reshape(-1, KEYS, *x.shape[1:]) for x in (keys, values))
    seen = seen.reshape(-1, QUERIES, padded // KEYS, KEYS)

    def block(number: Int[Array, ""]) -> Float[Array, "queries kv_heads group head"]:
        query = jnp.transpose(queries[number], (1, 2, 0, 3))
        blocks = (number * QUERIES) // KEYS + 1  # no query sees what comes after itself

        def read(at: Int[Array, ""], running: _Running) -> _Running:
            mask = seen[number, :, at]
            return lax.cond(
                mask.any(),
                lambda: _merge(running, scale, query, keys[at], values[at], mask),
                lambda: running,
            )

        done = lax.fori_loop(0, blocks, read, _nothing(query))
        return jnp.transpose(done.values / done.total[..., None], (2, 0, 1, 3))

    attended = lax.map(block, jnp.arange(padded // QUERIES))
    return attended.reshape(padded, -1, attended.shape[-1])[:size].astype(heads.values.dtype)


def _group(heads: Heads) -> tuple[int, int]:
    """Query heads that share keys, and their width."""
    _, count, width = heads.queries.shape
    return count // heads.keys.shape[1], width


def _nothing(query: Float[Array, "kv_heads group queries head"]) -> _Running:
    lead = query.shape[:-1]
    return _Running(jnp.full(lead, -jnp.inf), jnp.zeros(lead), jnp.zeros(query.shape))


def _merge(
    running: _Running,
    scale: float,
    query: Float[Array, "kv_heads group queries head"],
    keys: Float[Array, "keys kv_heads head"],
    values: Float[Array, "keys kv_heads head"],
    mask: Bool[Array, "queries keys"],
) -> _Running:
    """The softmax with one more block of keys."""
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[None, None], scale * dot("grqd,kgd->grqk", query, keys), -jnp.inf)
    largest = jnp.maximum(running.largest, logits.max(axis=-1))
    base = jnp.where(largest > -jnp.inf, largest, 0.0)  # rows that have seen nothing yet
    weights = jnp.exp(logits - base[..., None])
    kept = jnp.exp(running.largest - base)
    read = dot("grqk,kgd->grqd", weights.astype(values.dtype), values)
    return _Running(
        largest,
        kept * running.total + weights.sum(axis=-1),
        kept[..., None] * running.values + read,
    )


def causal(size: int) -> Seen:
    """Every position up to the query's own."""
    return jnp.tri(size, dtype=jnp.bool_)


def window(size: int, count: int, sinks: int) -> Seen:
    """`count` positions: the first `sinks` of the text, and the newest others."""
    back = jnp.arange(size)[:, None] - jnp.arange(size)[None]
    newest = (back >= 0) & (back < count - sinks)
    return newest | ((back >= 0) & (jnp.arange(size) < sinks)[None])


def selected(
    queries: Float[Array, "s index_heads index_dim"],
    keys: Float[Array, "s index_dim"],
    weights: Float[Array, "s index_heads"],
    count: int,
) -> Seen:
    """The `count` best positions by index score up to each query's own; ties to the lowest."""
    size = keys.shape[0]
    best = select_top_k(
        queries[None],
        keys[None],
        weights[None],
        jnp.arange(size)[None],
        count=count,
        chunk=QUERIES,
    )[0]
    named = jnp.where(best >= 0, best, size)  # out of bounds: dropped
    rows = jnp.broadcast_to(jnp.arange(size)[:, None], named.shape)
    return jnp.zeros((size, size), jnp.bool_).at[rows, named].set(True, mode="drop")
