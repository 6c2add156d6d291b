"""Pallas-Triton kernel: a row per program, which reads it once.

XLA launches three kernels: the largest number, the scale, and the rounding. A decode step has six
such rows per layer, and each takes less time than a launch.

What would have to change when Pallas-Triton goes: nothing here is more than loads, a maximum,
arithmetic and stores of a vector.
"""

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


def supports(x: Float[Array, "*n width"]) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {x.dtype} (only bfloat16 and float32)"
    if x.shape[-1] > LARGEST:
        return f"rows of {x.shape[-1]} numbers (at most {LARGEST})"
    return None


def round_rows(
    x: Float[Array, "*n width"], *, interpret: bool = False
) -> tuple[Float[Array, "*n width"], Float[Array, "*n"]]:
    """See `api.round_rows`.

    Raises:
        NotImplementedError: if the kernel does not support the operands.
    """
    if reason := supports(x):
        raise NotImplementedError(reason)
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    warps = max(1, min(16, pl.next_power_of_2(width) // (32 * PER_LANE)))
    call = pl.pallas_call(
        _kernel,
        grid=(len(flat),),
        in_specs=[whole],
        out_specs=[whole, whole],
        out_shape=[
            jax.ShapeDtypeStruct(flat.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((len(flat),), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="round_rows",
    )
    numbers, scales = call(flat)
    return numbers.reshape(x.shape), scales.reshape(x.shape[:-1])


def _kernel(
    x_ref: jax.Ref,  # [N, width]
    numbers_ref: jax.Ref,  # [N, width]
    scales_ref: jax.Ref,  # [N]
) -> None:
    width, row = x_ref.shape[1], pl.program_id(0)
    column = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(width),), 0)
    there = column < width
    x = plgpu.load(x_ref.at[row, column], mask=there, other=0.0).astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max() * (1.0 / E4M3_MAX), LEAST_SCALE)
    rounded = jnp.clip(x / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    plgpu.store(numbers_ref.at[row, column], rounded, mask=there)
    scales_ref[row] = scale
