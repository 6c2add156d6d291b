"""Pallas-Triton kernels: a row per program, which reads it once.

XLA launches three kernels: the largest number, the scale, and the rounding. A decode step has six
such rows per layer, and each takes less time than a launch. Rows between the products of an MLP are
scaled, gated and rounded in one.

What would have to change when Pallas-Triton goes: nothing here is more than loads, a maximum,
arithmetic and stores of a vector.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.scaled_rows import E4M3_MAX, LEAST_SCALE

LARGEST = 32_768
"""Numbers of a row at most: they are in the registers of a program."""

PER_LANE = 32
"""Numbers that a lane has, of long rows."""


def supports(dtype: jnp.dtype, width: int) -> str | None:
    """Why the kernels cannot make rows of so many numbers of such operands; None if they can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {dtype} (only bfloat16 and float32)"
    if width > LARGEST:
        return f"rows of {width} numbers (at most {LARGEST})"
    return None


def round_rows(
    x: Float[Array, "*n width"], *, interpret: bool = False
) -> tuple[Float[Array, "*n width"], Float[Array, "*n"]]:
    """See `api.round_rows`.

    Raises:
        NotImplementedError: if the kernel does not support the operands.
    """
    if reason := supports(x.dtype, x.shape[-1]):
        raise NotImplementedError(reason)
    numbers, scales = _launch(_kernel, (x.reshape(-1, x.shape[-1]),), x.shape[-1], interpret)
    return numbers.reshape(x.shape), scales.reshape(x.shape[:-1])


def round_gated(
    sums: Float[Array, "E M twice"],
    rows: Float[Array, "E M"],
    columns: Float[Array, "E twice"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "E M width"], Float[Array, "E M"]]:
    """See `api.round_gated`.

    Raises:
        NotImplementedError: if the kernel does not support the operands.
    """
    width = sums.shape[2] // 2
    if reason := supports(sums.dtype, width):
        raise NotImplementedError(reason)
    operands = sums.reshape(-1, 2 * width), rows.reshape(-1), columns
    kernel = functools.partial(_gated_kernel, of_matrix=sums.shape[1])
    numbers, scales = _launch(kernel, operands, width, interpret)
    return numbers.reshape(*sums.shape[:2], width), scales.reshape(sums.shape[:2])


def _launch(
    kernel: Callable[..., None],
    operands: tuple[Array, ...],
    width: int,
    interpret: bool,
) -> tuple[Float[Array, "n width"], Float[Array, " n"]]:
    """A program for each row of the first operand."""
    count = len(operands[0])
    whole = pl.BlockSpec(memory_space=pl.ANY)
    warps = max(1, min(16, pl.next_power_of_2(width) // (32 * PER_LANE)))
    call = pl.pallas_call(
        kernel,
        grid=(count,),
        in_specs=[whole] * len(operands),
        out_specs=[whole, whole],
        out_shape=[
            jax.ShapeDtypeStruct((count, width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="round_rows",
    )
    return call(*operands)


def _kernel(
    x_ref: jax.Ref,  # [N, width]
    numbers_ref: jax.Ref,  # [N, width]
    scales_ref: jax.Ref,  # [N]
) -> None:
    row, column, there = _places(numbers_ref)
    x = plgpu.load(x_ref.at[row, column], mask=there, other=0.0).astype(jnp.float32)
    _round(x, numbers_ref, scales_ref)


def _gated_kernel(
    sums_ref: jax.Ref,  # [N, 2 width]
    rows_ref: jax.Ref,  # [N]
    columns_ref: jax.Ref,  # [E, 2 width]
    numbers_ref: jax.Ref,  # [N, width]
    scales_ref: jax.Ref,  # [N]
    *,
    of_matrix: int,
) -> None:
    row, column, there = _places(numbers_ref)
    matrix, scale = lax.div(row, of_matrix), rows_ref[row]

    def part(first: int) -> Float[Array, " padded"]:
        at = first + column
        sums = plgpu.load(sums_ref.at[row, at], mask=there, other=0.0).astype(jnp.float32)
        return sums * scale * plgpu.load(columns_ref.at[matrix, at], mask=there, other=0.0)

    gate, up = part(0), part(numbers_ref.shape[1])
    _round(gate / (1.0 + jnp.exp(-gate)) * up, numbers_ref, scales_ref)


def _places(numbers_ref: jax.Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row of this program, places in it, and which of them there are."""
    width = numbers_ref.shape[1]
    column = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(width),), 0)
    return pl.program_id(0), column, column < width


def _round(x: Float[Array, " padded"], numbers_ref: jax.Ref, scales_ref: jax.Ref) -> None:
    """Store a row divided by its scale; what is beyond its end is 0."""
    row, column, there = _places(numbers_ref)
    scale = jnp.maximum(jnp.abs(x).max() * (1.0 / E4M3_MAX), LEAST_SCALE)
    rounded = jnp.clip(x / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    plgpu.store(numbers_ref.at[row, column], rounded, mask=there)
    scales_ref[row] = scale
