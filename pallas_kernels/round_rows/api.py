"""Rows rounded to e4m3, for products in which both operands have 8 bits."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.round_rows import reference, triton

# Traced and lowered once for all layers: see `sparse_attention.api`.
_rows = jax.jit(triton.round_rows)
_gated = jax.jit(triton.round_gated)


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
    match resolve("round_rows", backend, refusal=triton.supports(x.dtype, x.shape[-1])):
        case "triton":
            return _rows(x)
        case _:
            return reference.round_rows(x)


def round_gated(
    sums: Float[Array, "E M twice"],
    rows: Float[Array, "E M"],
    columns: Float[Array, "E twice"],
    *,
    backend: Backend | None = None,
) -> tuple[Float[Array, "E M width"], Float[Array, "E M"]]:
    """`round_rows` of `silu(gate) * up`, where both are products that are still to be scaled.

    Args:
        sums: bfloat16 or float32 gates, and behind them ups, of M rows times each of E matrices.
        rows: float32 scales of the rows.
        columns: float32 scales of the matrices' output channels.
        backend: see `round_rows`.

    Returns:
        See `round_rows`; what is rounded is float32.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    refusal = triton.supports(sums.dtype, sums.shape[2] // 2)
    match resolve("round_rows", backend, refusal=refusal):
        case "triton":
            return _gated(sums, rows, columns)
        case _:
            return reference.round_gated(sums, rows, columns)
