"""Exact sparse attention in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.rows import gather_words, unpack, words_of
from pallas_kernels.common.scaled_rows import ScaledRow, decode


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S *W"],
    location: Int[Array, "R T K"],
    sinks: Float[Array, " H"] | None = None,
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """See `api.sparse_attention`."""
    keys = _rows(slots, jnp.maximum(location, 0), offset, query.shape[-1], row_format)
    keys = keys.astype(query.dtype)
    selected = (location >= 0)[:, :, None, :]
    logits = scale * jnp.einsum(
        "rthd,rtkd->rthk",
        query,
        keys,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    logits = jnp.where(selected, logits, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, extra], axis=-1)
    peak = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights[..., : location.shape[-1]]
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


def _rows(
    slots: Int[Array, "S *W"],
    location: Int[Array, "R T K"],
    offset: int,
    width: int,
    row_format: DTypeLike | ScaledRow,
) -> Float[Array, "R T K width"]:
    """The numbers of the rows in slots that are all in bounds."""
    if isinstance(row_format, ScaledRow):
        return decode(gather_words(slots, location, offset, row_format.words), row_format)
    return unpack(gather_words(slots, location, offset, words_of(width, row_format)), row_format)
