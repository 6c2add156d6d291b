"""Attention over a whole sequence: causal, or over a few selected positions per query.

Plain JAX, no weights. Queries are processed in chunks and recomputed in the backward pass, so that
nothing of the size `sequence x sequence x heads` is ever kept.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.models.glm.attention import Expanded, Projected
from dhisparse_jax.models.glm.indexer import index_scores

CausalBackend = Literal["xla", "cudnn"]

_T = TypeVar("_T")


def map_query_chunks(fn: Callable[..., _T], *queries: jax.Array, chunk: int) -> _T:
    """Applies `fn` to chunks of at most `chunk` queries and joins the results.

    Args:
        fn: Takes one array `[batch, chunk, ...]` per entry of `queries` and returns a pytree of
            such arrays. Its intermediate values are recomputed in the backward pass.
        *queries: Arrays `[batch, sequence, ...]`.
        chunk: Queries per call; a sequence that is not a multiple is padded with zeros.
    """
    length = queries[0].shape[1]
    chunk = min(chunk, length)
    count = -(-length // chunk)

    def split(x: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, count * chunk - length), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, padding).reshape(x.shape[0], count, chunk, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * chunk, *x.shape[3:])[:, :length]

    step = jax.checkpoint(lambda parts: fn(*parts))
    return jax.tree.map(join, jax.lax.map(step, tuple(split(x) for x in queries)))


def causal_mask(positions: Int[Array, "batch t"], length: int) -> Bool[Array, "batch t {length}"]:
    """True where key position s is at or before the query's position."""
    return jnp.arange(length)[None, None] <= positions[..., None]


def causal_weights(
    q: Float[Array, "batch t heads qk"],
    k: Float[Array, "batch s heads qk"],
    positions: Int[Array, "batch t"],
    scale: float,
) -> Float[Array, "batch heads t s"]:
    """Float32 attention distribution of each head over all positions up to the query's own."""
    logits = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    mask = causal_mask(positions, k.shape[1])[:, None]
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)


def causal_attention(
    inputs: Expanded,
    positions: Int[Array, "batch s"],
    scale: float,
    *,
    chunk: int,
    backend: CausalBackend = "xla",
) -> Float[Array, "batch s heads v"]:
    """Attention over every position up to the query's own.

    Args:
        inputs: Expanded queries, keys and values.
        positions: `arange(s)` for each sequence.
        scale: Factor on the query-key products.
        chunk: Queries per step of the "xla" backend.
        backend: "cudnn" is the fused kernel: CUDA only, half precision, heads of at most 128.
    """
    q, k, v, _ = inputs
    if backend == "cudnn":
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, implementation="cudnn"
        )

    def attend(q: jax.Array, positions: jax.Array) -> jax.Array:
        weights = causal_weights(q, k, positions, scale).astype(v.dtype)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return map_query_chunks(attend, q, positions, chunk=chunk)


def sparse_weights(
    q_latent: Float[Array, "batch t heads latent"],
    q_rope: Float[Array, "batch t heads rope"],
    rows: Float[Array, "batch t chosen row"],
    valid: Bool[Array, "batch t chosen"],
    scale: float,
) -> Float[Array, "batch t heads chosen"]:
    """Float32 attention distribution of each head over rows gathered for each query."""
    latent = q_latent.shape[-1]
    logits = jnp.einsum(
        "bthr,btkr->bthk", q_latent, rows[..., :latent], preferred_element_type=jnp.float32
    ) + jnp.einsum(
        "bthr,btkr->bthk", q_rope, rows[..., latent:], preferred_element_type=jnp.float32
    )
    return jax.nn.softmax(jnp.where(valid[:, :, None], logits * scale, -jnp.inf), axis=-1)


def gather_rows(
    rows: Float[Array, "batch s row"], selected: Int[Array, "batch t chosen"]
) -> Float[Array, "batch t chosen row"]:
    """The rows at `selected`; row 0 where that is -1.

    The gather reads a float32 copy: its transpose is a scatter-add with thousands of summands for
    a popular row, which must not be rounded to half precision one by one.
    """
    wide = rows.astype(jnp.float32)
    gathered = jax.vmap(lambda r, s: r[s])(wide, jnp.maximum(selected, 0))
    return gathered.astype(rows.dtype)


def sparse_attention(
    inputs: Projected,
    selected: Int[Array, "batch s chosen"],
    scale: float,
    *,
    chunk: int,
) -> tuple[Float[Array, "batch s heads latent"], Float[Array, "batch s chosen"]]:
    """Absorbed attention over the selected positions.

    Args:
        inputs: Absorbed queries, and the row of every position.
        selected: Positions that each query attends to, -1 where there is none; at least one.
        scale: Factor on the query-key products.
        chunk: Queries per step.

    Returns:
        The attention-weighted latents of each head, and the weight of each selected position
        averaged over the heads, float32.
    """
    latent = inputs.q_latent.shape[-1]

    def attend(
        q_latent: jax.Array, q_rope: jax.Array, selected: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rows = gather_rows(inputs.row, selected)
        weights = sparse_weights(q_latent, q_rope, rows, selected >= 0, scale)
        context = jnp.einsum("bthk,btkr->bthr", weights.astype(rows.dtype), rows[..., :latent])
        return context, jnp.mean(weights, axis=2)

    return map_query_chunks(attend, inputs.q_latent, inputs.q_rope, selected, chunk=chunk)


def select_top_k(
    queries: Float[Array, "batch t index_heads index_dim"],
    keys: Float[Array, "batch s index_dim"],
    weights: Float[Array, "batch t index_heads"],
    positions: Int[Array, "batch t"],
    *,
    count: int,
    chunk: int,
) -> Int[Array, "batch t chosen"]:
    """The `count` positions with the highest index score at or before each query's own.

    Exact; ties go to the lowest position. Best first, padded with -1 where fewer are visible; the
    width is `min(count, s)`. Carries no gradient.
    """
    queries, keys, weights = jax.lax.stop_gradient((queries, keys, weights))

    def select(queries: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
        scores = index_scores(queries, keys, weights)
        visible = causal_mask(positions, keys.shape[1])
        # Zero and minus zero are a tie, but a sort may tell them apart.
        scores = jnp.where(scores == 0, 0.0, scores)
        values, chosen = jax.lax.top_k(
            jnp.where(visible, scores, -jnp.inf), min(count, keys.shape[1])
        )
        return jnp.where(values > -jnp.inf, chosen, -1)

    return map_query_chunks(select, queries, weights, positions, chunk=chunk)


def window_positions(positions: Int[Array, "batch s"], count: int) -> Int[Array, "batch s chosen"]:
    """The newest `count` positions up to each query's own, newest first, padded with -1."""
    recent = positions[..., None] - jnp.arange(min(count, positions.shape[1]))[None, None]
    return jnp.maximum(recent, -1)
