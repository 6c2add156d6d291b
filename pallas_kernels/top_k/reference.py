"""Exact top-K in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import INT32_MAX, masked


def top_k(scores: Float[Array, "R T C"], k: int) -> Int[Array, "R T K"]:
    """See `api.top_k`."""
    # top_k orders -0.0 below 0.0, so it would not see them as a tie: make every zero positive.
    best, positions = lax.top_k(jnp.where(scores == 0.0, 0.0, scores), k)
    ascending = jnp.sort(jnp.where(best > -jnp.inf, positions, INT32_MAX), axis=-1)
    return masked(ascending, ascending < INT32_MAX)
