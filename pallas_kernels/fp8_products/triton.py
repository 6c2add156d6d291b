"""Pallas-Triton kernel of the products.

Few rows go with each matrix, so time is what it takes to read the numbers. A program reads a strip
of one matrix, `tuning.columns` output channels, in tiles of `tuning.depth` input channels, which
the compiler fetches `tuning.stages` ahead. Numbers become bfloat16, which is exact, and are the
left operand of the matrix units; the rows, as the right operand, are as narrow as these take.
Scales multiply the sums once, at the end.

Mosaic GPU instead would need the numbers converted between shared memory and the matrix units in
registers, for which `plgpu.wgmma` has the layouts; nothing here depends on Triton otherwise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

LEAST_ROWS, MOST_ROWS = 16, 128
"""Rows of a block: what the matrix units take at least, and what registers hold at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut.

    Attributes:
        columns: output channels of a program.
        depth: input channels of a tile.
        stages: tiles under way.
        warps: of a program.
    """

    columns: int = 64
    depth: int = 128
    stages: int = 4
    warps: int = 4


def supports(x: Float[Array, "E M K"], numbers: Float[Array, "E N K"], sizes: Tuning) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, rows, depth = x.shape
    if x.dtype != jnp.bfloat16:
        return f"rows of {x.dtype} (only bfloat16)"
    if not LEAST_ROWS <= rows <= MOST_ROWS or rows & (rows - 1):
        return f"{rows} rows (a power of two from {LEAST_ROWS} to {MOST_ROWS})"
    if depth % sizes.depth or numbers.shape[1] % sizes.columns:
        return f"matrices of {numbers.shape[1]} x {depth}, not in tiles of {sizes}"
    return None


def products(
    x: Float[Array, "E M K"],
    numbers: Float[Array, "E N K"],
    scale: Float[Array, "E N"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "E M N"]:
    """See `api.products`."""
    sizes = tuning or Tuning()
    if reason := supports(x, numbers, sizes):
        raise NotImplementedError(reason)
    (count, rows, depth), channels = x.shape, numbers.shape[1]
    strip = lambda expert, column: (expert, column, 0)
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid=(count, channels // sizes.columns),
        in_specs=[
            pl.BlockSpec((None, rows, depth), lambda expert, _: (expert, 0, 0)),
            pl.BlockSpec((None, sizes.columns, depth), strip),
            pl.BlockSpec((None, sizes.columns), lambda expert, column: (expert, column)),
        ],
        out_specs=pl.BlockSpec(
            (None, rows, sizes.columns), lambda expert, column: (expert, 0, column)
        ),
        out_shape=jax.ShapeDtypeStruct((count, rows, channels), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="fp8_products",
    )
    return call(x, numbers, scale)


def _kernel(
    x_ref: jax.Ref, numbers_ref: jax.Ref, scale_ref: jax.Ref, out_ref: jax.Ref, *, sizes: Tuning
) -> None:
    rows, depth = x_ref.shape

    def add(tile: Array, sums: Float[Array, "columns M"]) -> Float[Array, "columns M"]:
        at = pl.ds(tile * sizes.depth, sizes.depth)
        some = numbers_ref[:, at].astype(x_ref.dtype)
        return sums + jnp.dot(some, x_ref[:, at].T, preferred_element_type=jnp.float32)

    sums = jnp.zeros((sizes.columns, rows), jnp.float32)
    sums = lax.fori_loop(0, depth // sizes.depth, add, sums)
    out_ref[...] = (sums * scale_ref[...][:, None]).T.astype(out_ref.dtype)
