"""Pallas-Triton kernel of the products.

Few rows go with each matrix, so time is what it takes to read the numbers and to make them
bfloat16. A program reads a strip of one matrix, `columns` output channels, in tiles of `depth`
bytes, and multiplies both halves of a tile with their rows. The numbers are the left operand of
the matrix units, which they reach from registers; rows that there are not take no part beyond the
block that they are in.

The bits of a number become those of a bfloat16 whose exponent is 126 too low, which is exact (and
below the normal numbers). Multiplied by its scale, as a bfloat16 whose exponent is 63 too high, it
is exact again; sums are multiplied by the 2**63 that are missing. One instruction does that for two
numbers, and Triton has none for two: hence the assembly, three instructions for each number.

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
SHIFT = 63
"""By which exponents of multiplied numbers are too low: scales of 2**-62 to 2**64 are exact."""
MANTISSA = 7
"""Bits of a bfloat16's."""


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
        functools.partial(_kernel, sizes=sizes, interpret=interpret),
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
    interpret: bool,
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
            bits = numbers_ref[:, pl.ds(start, sizes.depth)]
            factor = _factors(scales_ref[:, pl.ds(tile * scaled, scaled)], sizes.depth)
            low, high = (
                _numbers(bits, factor, shifts, interpret=interpret) for shifts in (LOW, HIGH)
            )
            sums = sums + jnp.dot(low, rows_at(start), preferred_element_type=jnp.float32)
            return sums + jnp.dot(high, rows_at(half + start), preferred_element_type=jnp.float32)

        sums = jnp.zeros((sizes.columns, block), jnp.float32)
        sums = lax.fori_loop(0, half // sizes.depth, add, sums)
        kept = first + lax.broadcasted_iota(jnp.int32, (block, sizes.columns), 0) < rows
        at = out_ref.at[pl.ds(first, block), :]
        plgpu.store(at, (sums * 2.0**SHIFT).T.astype(out_ref.dtype), mask=kept)

    lax.fori_loop(0, pl.cdiv(count_ref[...], block), multiply, None)


def _factors(scales: UInt8[Array, "columns scaled"], depth: int) -> Float[Array, "columns depth"]:
    """What each number is multiplied with, as a bfloat16; 16 bytes share it."""
    factor = lax.bitcast_convert_type((scales.astype(jnp.int16) + SHIFT) << MANTISSA, jnp.bfloat16)
    columns, scaled = factor.shape
    spread = jnp.broadcast_to(factor[:, :, None], (columns, scaled, depth // scaled))
    return spread.reshape(columns, depth)


_PAIR = """
    prmt.b32 pair, $2, 0, {bytes};
    shl.b32 sign, pair, {sign};
    and.b32 sign, sign, 0x80008000;
    shl.b32 pair, pair, {number};
    lop3.b32 pair, pair, 0x01c001c0, sign, 0xea;
    fma.rn.bf16x2 {out}, pair, {factors}, zero;
"""
"""Half of each of two bytes times their factors.

The two, each alone in 16 bits, are snnnSNNN, of a high and a low number. The low one shifted by 6,
and by 12 for its sign, is S000000NNN000000: a bfloat16 with two bits of exponent and one of
mantissa; 0xea stands for a & b | c. A product and -0 (`zero`) are that product."""

LOW, HIGH = {"number": 6, "sign": 12}, {"number": 2, "sign": 8}
"""Where the numbers of a byte go from."""


def assembly(shifts: dict[str, int]) -> str:
    """Half of each of four bytes ($2) times the bytes' factors ($3, $4), to $0 and $1."""
    first = _PAIR.format(bytes="0x4140", out="$0", factors="$3", **shifts)
    second = _PAIR.format(bytes="0x4342", out="$1", factors="$4", **shifts)
    begin = ".reg .b32 pair, sign, zero;\n    mov.b32 zero, 0x80008000;\n"
    return f"\n{{\n    {begin}{first}{second}}}\n"


def _numbers(
    bits: UInt8[Array, "columns depth"],
    factor: Float[Array, "columns depth"],
    shifts: dict[str, int],
    *,
    interpret: bool,
) -> Float[Array, "columns depth"]:
    """The low or the high numbers of packed bytes, times their factors."""
    if interpret:
        return _numbers_in_jnp(bits, factor, shifts)
    (numbers,) = plgpu.elementwise_inline_asm(
        assembly(shifts),
        args=(bits, factor),
        constraints="=&r,=&r,r,r,r",
        pack=4,
        result_shape_dtypes=(jax.ShapeDtypeStruct(factor.shape, factor.dtype),),
    )
    return numbers


def _numbers_in_jnp(
    bits: UInt8[Array, "columns depth"],
    factor: Float[Array, "columns depth"],
    shifts: dict[str, int],
) -> Float[Array, "columns depth"]:
    """What the assembly does, by float32 numbers: a CPU takes very small ones for zero."""
    number = (bits.astype(jnp.int32) << shifts["number"]) & 0x1C0
    sign = (bits.astype(jnp.int32) << shifts["sign"]) & 0x8000
    exact = lax.bitcast_convert_type(((number << 3) | sign).astype(jnp.int16), jnp.float16)
    scaled = factor.astype(jnp.float32) * 2.0 ** (14 - 126)
    return (exact.astype(jnp.float32) * scaled).astype(factor.dtype)
