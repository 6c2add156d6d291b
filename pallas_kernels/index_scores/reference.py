"""Exact index scores in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Float[Array, "R C width"],
    visible: Int[Array, "R T"],
) -> Float[Array, "R T C"]:
    """See `api.index_scores`."""
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
