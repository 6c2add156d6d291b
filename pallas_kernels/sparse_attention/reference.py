"""Exact sparse attention in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.rows import gather_words, unpack, words_of


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S W"],
    location: Int[Array, "R T K"],
    *,
    offset: int,
    row_dtype: DTypeLike,
    value_width: int,
    scale: float,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """See `api.sparse_attention`."""
    words = words_of(query.shape[-1], row_dtype)
    keys = gather_words(slots, jnp.maximum(location, 0), offset, words)
    keys = unpack(keys, row_dtype).astype(query.dtype)
    selected = (location >= 0)[:, :, None, :]
    logits = scale * jnp.einsum(
        "rthd,rtkd->rthk",
        query,
        keys,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    logits = jnp.where(selected, logits, -jnp.inf)
    peak = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (peak + jnp.log(total))[..., 0]
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    # A masked slot may hold any bytes, NaN among them, and 0 * NaN is NaN: blank its values.
    values = jnp.where(selected[:, :, 0, :, None], keys[..., :value_width], 0.0)
    attended = jnp.einsum(
        "rthk,rtkd->rthd",
        (weights / total).astype(values.dtype),
        values,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return attended.astype(query.dtype), lse
