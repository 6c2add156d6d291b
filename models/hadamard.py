"""The Hadamard rotation of index heads: it spreads outliers over all numbers before they are small.

Source: the published inference code of DeepSeek-V3.2. Queries and keys are both rotated, so their
products stay what they were, but for rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def hadamard(width: int) -> Float[np.ndarray, "width width"]:
    """The matrix of Sylvester's construction: 1 or -1 by the parity of the bits in common.

    Args:
        width: a power of two.
    """
    bits = np.arange(width)
    odd = np.bitwise_count(bits[:, None] & bits[None]) % 2
    return np.where(odd, -1.0, 1.0)


def rotate_hadamard(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """`x` times the normalised matrix, summed in float32 and rounded to the dtype of `x`."""
    matrix = jnp.asarray(hadamard(x.shape[-1]), x.dtype)  # 1 and -1 are exact in every dtype
    turned = jnp.matmul(
        x, matrix, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return (turned * x.shape[-1] ** -0.5).astype(x.dtype)
