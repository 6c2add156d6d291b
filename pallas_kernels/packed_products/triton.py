"""Pallas-Triton kernel of the products.

Few rows go with each matrix, so time is what it takes to read the numbers and to make them
bfloat16. A program reads a strip of one matrix, `columns` output channels, in tiles of `depth`
bytes, and multiplies both halves of a tile with their rows. The numbers are the left operand of
the matrix units, which they reach from registers; rows that there are not take no part beyond the
block that they are in.

The bits of a number become those of a float16 whose exponent is 14 too low, which is exact, its
scale corrects that in float32, and the product is exact in bfloat16.

Mosaic GPU instead would need the numbers in registers in the layout of the matrix units' left
operand, for which `plgpu.wgmma` has one; nothing here depends on Triton otherwise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Shaped, UInt8

BLOCK = 32
"""Inputs that share a scale."""
EXPONENT_BITS = 14
"""By which the float16 with the bits of a number is too small."""
MANTISSA = 23
"""Bits of a float32's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut.

    Attributes:
        rows: of a block, at most; a power of two.
        columns: output channels of a program.
        depth: bytes of a tile.
        stages: tiles under way.
        warps: of a program.
    """

    rows: int = 64
    columns: int = 128
    depth: int = 64
    stages: int = 3
    warps: int = 8


LEAST_ROWS = 16
"""Rows of a block: what the matrix units take at least."""


def supports(
    x: Float[Array, "E M K"],
    numbers: UInt8[Array, "E N half"],
    scales: Shaped[Array, "E N blocks"],
    tuning: Tuning | None = None,
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    sizes, (_, channels, half) = tuning or Tuning(), numbers.shape
    if x.dtype != jnp.bfloat16:
        return f"rows of {x.dtype} (only bfloat16)"
    if scales.dtype != jnp.float8_e8m0fnu or scales.shape[-1] * BLOCK != 2 * half:
        return f"{scales.shape[-1]} scales of {scales.dtype} for {2 * half} inputs"
    if half % sizes.depth or channels % sizes.columns:
        return f"matrices of {channels} x {2 * half}, not in tiles of {sizes}"
    return None


def packed_products(
    x: Float[Array, "E M K"],
    numbers: UInt8[Array, "E N half"],
    scales: Shaped[Array, "E N blocks"],
    counts: Int[Array, " E"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "E M N"]:
    """See `api.packed_products`.

    Raises:
        NotImplementedError: if the kernel does not support the operands.
    """
    sizes = tuning or Tuning()
    if reason := supports(x, numbers, scales, sizes):
        raise NotImplementedError(reason)
    (count, rows, depth), channels = x.shape, numbers.shape[1]
    of_expert = lambda _, expert: (expert, 0, 0)
    strip = lambda column, expert: (expert, column, 0)
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid=(channels // sizes.columns, count),
        in_specs=[
            pl.BlockSpec((None, rows, depth), of_expert),
            pl.BlockSpec((None, sizes.columns, depth // 2), strip),
            pl.BlockSpec((None, sizes.columns, depth // BLOCK), strip),
            pl.BlockSpec((None,), lambda _, expert: (expert,)),
        ],
        out_specs=pl.BlockSpec(
            (None, rows, sizes.columns), lambda column, expert: (expert, 0, column)
        ),
        out_shape=jax.ShapeDtypeStruct((count, rows, channels), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="packed_products",
    )
    return call(x, numbers, lax.bitcast_convert_type(scales, jnp.uint8), counts)


def _kernel(
    x_ref: jax.Ref,  # [M, K]
    numbers_ref: jax.Ref,  # [columns, K / 2]
    scales_ref: jax.Ref,  # [columns, K / 32]
    count_ref: jax.Ref,  # []
    out_ref: jax.Ref,  # [M, columns]
    *,
    sizes: Tuning,
) -> None:
    rows, depth = x_ref.shape
    block = min(sizes.rows, max(LEAST_ROWS, pl.next_power_of_2(rows)))
    half, scaled = depth // 2, sizes.depth * 2 // BLOCK

    def multiply(number: Array, _: None) -> None:
        first = number * block
        there = first + lax.broadcasted_iota(jnp.int32, (block, sizes.depth), 0) < rows

        def rows_at(start: Array) -> Float[Array, "depth block"]:
            at = x_ref.at[pl.ds(first, block), pl.ds(start, sizes.depth)]
            return plgpu.load(at, mask=there, other=0.0).T

        def add(tile: Array, sums: Float[Array, "columns block"]) -> Float[Array, "columns block"]:
            start = tile * sizes.depth
            bits = numbers_ref[:, pl.ds(start, sizes.depth)].astype(jnp.int32)
            factor = _factors(scales_ref[:, pl.ds(tile * scaled, scaled)], sizes.depth)
            low = _numbers(((bits & 7) << 9) | ((bits & 8) << 12), factor)
            sums = sums + jnp.dot(low, rows_at(start), preferred_element_type=jnp.float32)
            high = _numbers(((bits & 0x70) << 5) | ((bits & 0x80) << 8), factor)
            return sums + jnp.dot(high, rows_at(half + start), preferred_element_type=jnp.float32)

        sums = jnp.zeros((sizes.columns, block), jnp.float32)
        sums = lax.fori_loop(0, half // sizes.depth, add, sums)
        kept = first + lax.broadcasted_iota(jnp.int32, (block, sizes.columns), 0) < rows
        at = out_ref.at[pl.ds(first, block), :]
        plgpu.store(at, sums.T.astype(out_ref.dtype), mask=kept)

    lax.fori_loop(0, pl.cdiv(count_ref[...], block), multiply, None)


def _factors(scales: UInt8[Array, "columns scaled"], depth: int) -> Float[Array, "columns depth"]:
    """What the float16 of each number is multiplied with; 16 bytes share it."""
    bits = (scales.astype(jnp.int32) + EXPONENT_BITS) << MANTISSA
    factor = lax.bitcast_convert_type(bits, jnp.float32)
    columns, scaled = factor.shape
    spread = jnp.broadcast_to(factor[:, :, None], (columns, scaled, depth // scaled))
    return spread.reshape(columns, depth)


def _numbers(
    bits: Int[Array, "columns depth"], factor: Float[Array, "columns depth"]
) -> Float[Array, "columns depth"]:
    """The numbers that the bits of float16 stand for, as bfloat16."""
    half = lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)
    return (half.astype(jnp.float32) * factor).astype(jnp.bfloat16)
