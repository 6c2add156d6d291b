"""Products of few rows with fp8 matrices, one matrix for each block of rows."""

from jaxtyping import Array, Float

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.fp8_products import reference, triton
from pallas_kernels.fp8_products.triton import Tuning


def fp8_products(
    x: Float[Array, "E M K"],
    numbers: Float[Array, "E N K"],
    scale: Float[Array, "E N"],
    *,
    backend: Backend | None = None,
) -> Float[Array, "E M N"]:
    """`x[e] @ (scale[e] * numbers[e]).T` for every e.

    Args:
        x: rows, in any float dtype.
        numbers: e4m3, [out, in] as checkpoints store them.
        scale: float32 of every output channel.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        Products in the dtype of `x`, sums in float32 and scaled before they are rounded.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    refusal = triton.supports(x, numbers, Tuning())
    match resolve("fp8_products", backend, refusal=refusal):
        case "triton":
            return triton.products(x, numbers, scale)
        case _:
            return reference.products(x, numbers, scale)
