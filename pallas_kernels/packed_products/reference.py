"""The exact products, in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.common.e2m1 import unpack_e2m1


def halved(x: Float[Array, "*n K"]) -> Float[Array, "*n K"]:
    """The even columns, then the odd ones."""
    return jnp.concatenate((x[..., 0::2], x[..., 1::2]), axis=-1)


def packed_products(
    x: Float[Array, "E M K"],
    numbers: UInt8[Array, "E N half"],
    scales: Shaped[Array, "E N blocks"],
    counts: Int[Array, " E"],
) -> Float[Array, "E M N"]:
    """See `api.packed_products`; all rows are multiplied."""
    matrix = unpack_e2m1(numbers, jnp.float32)
    each = matrix.shape[-1] // scales.shape[-1]
    matrix = halved(matrix * jnp.repeat(scales.astype(jnp.float32), each, axis=-1))
    sums = jnp.einsum(
        "emk,enk->emn", x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST
    )
    return sums.astype(x.dtype)
