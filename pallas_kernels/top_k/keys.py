"""Scores as integers in the same order, in which kernels look for the K-th by bisection."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

LOWEST = -0x7F7FFFFF
"""The key of the lowest selectable score. The key of -inf is one less."""


def keys_of(scores: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Integers in the order of the scores, both zeros alike.

    In:  -inf         -1.0         -0.0  0.0  1.0         inf
    Out: -0x7F800000  -0x3F800000   0    0    0x3F800000  0x7F800000
    """
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)
