"""Exact index scores in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.scaled_rows import decode
from pallas_kernels.index_scores.types import Keys, ScaledKeys, packed_format


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
) -> Float[Array, "R T C"]:
    """See `api.index_scores`."""
    if isinstance(keys, ScaledKeys):
        # bfloat16 and e4m3 numbers are exact in float32, and so, but for one rounding, is a key.
        queries = queries.astype(jnp.float32)
        keys = keys.numbers.astype(jnp.float32) * keys.scales[..., None]
    elif keys.dtype == jnp.int32:
        queries = queries.astype(jnp.float32)
        keys = decode(keys, packed_format(queries.shape[-1]))
    elif keys.dtype != queries.dtype:
        queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
    dots = jnp.einsum(
        "rthd,rcd->rthc",
        queries,
        keys,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.einsum(
        "rth,rthc->rtc", weights, jnp.maximum(dots, 0.0), precision=lax.Precision.HIGHEST
    )
    seen = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None] < visible[:, :, None]
    return jnp.where(seen, scores, -jnp.inf)
