"""Rows rounded to e4m3, for products in which both operands have 8 bits."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.round_rows import reference, triton

# Traced and lowered once for all layers: see `sparse_attention.api`.
_triton = jax.jit(triton.round_rows)


def round_rows(
    x: Float[Array, "*n width"], *, backend: Backend | None = None
) -> tuple[Float[Array, "*n width"], Float[Array, "*n"]]:
    """Every row divided by its scale, which makes its largest number 448, and rounded.

    What published fp8 checkpoints call dynamic activation scaling, with a scale for a whole row
    where they have one for each 128 numbers: it belongs behind the sum of a product.

    Args:
        x: bfloat16 or float32.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        e4m3 numbers, and float32 scales. Backends differ in how they divide: now and then a number
        next to the middle of two others is rounded to the other one.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    match resolve("round_rows", backend, refusal=triton.supports(x)):
        case "triton":
            return _triton(x)
        case _:
            return reference.round_rows(x)
