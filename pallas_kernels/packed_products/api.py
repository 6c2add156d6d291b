"""Products of few rows with matrices of packed 4-bit numbers, one for each block of rows."""

import jax
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.packed_products import reference, triton

# Traced and lowered once for all layers: see `sparse_attention.api`.
_triton = jax.jit(triton.packed_products)


def packed_products(
    x: Float[Array, "E M K"],
    numbers: UInt8[Array, "E N half"],
    scales: Shaped[Array, "E N blocks"],
    counts: Int[Array, " E"],
    *,
    backend: Backend | None = None,
) -> Float[Array, "E M N"]:
    """`x[e] @ matrix[e].T` for every e.

    A matrix is `[out, in]`, e2m1 numbers in bytes of two, times a power of two for each 32 inputs.
    Byte c has the numbers of the inputs 2 c, in its low half, and 2 c + 1. So the halves of all
    bytes are two matrices, of every other input each, and numbers are multiplied where they are.

    Args:
        x: rows, any float dtype; first the even inputs, then the odd ones (`halved`).
        numbers: bytes.
        scales: e8m0; for the kernel up to 2^112.
        counts: int32, how many rows of each block there are.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        Products in the dtype of `x`, sums in float32. Rows from the count on mean nothing.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    refusal = triton.supports(x, numbers, scales)
    match resolve("packed_products", backend, refusal=refusal):
        case "triton":
            return _triton(x, numbers, scales, counts)
        case _:
            return reference.packed_products(x, numbers, scales, counts)
