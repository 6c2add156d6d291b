"""Pallas-Triton kernel: a matrix per lane, all steps in its registers.

XLA runs such steps turn by turn, four launches each: 6,000 in a decode step of DeepSeek-V4.1.

What would have to change when Pallas-Triton goes: nothing here is more than loads, arithmetic and
stores of vectors.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

LANES = 32
"""Matrices of a program, a warp."""

LARGEST = 8
"""Rows of a matrix at most: its numbers are in the registers of a lane."""

Matrix = list[list[jax.Array]]
"""Numbers by row and column, each of every matrix of a program."""


def supports(logits: Float[Array, "*n size size"]) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    if logits.dtype != jnp.float32:
        return f"logits of {logits.dtype} (only float32)"
    if logits.shape[-1] > LARGEST:
        return f"matrices of {logits.shape[-1]} rows (at most {LARGEST})"
    return None


def sinkhorn(
    logits: Float[Array, "*n size size"], *, steps: int, epsilon: float, interpret: bool = False
) -> Float[Array, "*n size size"]:
    """See `api.sinkhorn`.

    Raises:
        NotImplementedError: if the kernel does not support the operands.
    """
    if reason := supports(logits):
        raise NotImplementedError(reason)
    size = logits.shape[-1]
    flat = logits.reshape(-1, size * size)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_kernel, size=size, steps=steps, epsilon=epsilon),
        grid=(pl.cdiv(flat.shape[0], LANES),),
        in_specs=[whole],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(flat.shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="sinkhorn",
    )
    return call(flat).reshape(logits.shape)


def _kernel(
    logits_ref: jax.Ref,  # [N, size * size]
    out_ref: jax.Ref,  # [N, size * size]
    *,
    size: int,
    steps: int,
    epsilon: float,
) -> None:
    at = pl.program_id(0) * LANES + lax.broadcasted_iota(jnp.int32, (LANES,), 0)
    there, places = at < logits_ref.shape[0], range(size)
    load = lambda place: plgpu.load(logits_ref.at[at, place], mask=there, other=0.0)
    carry = [
        [each + epsilon for each in _softmax([load(row * size + column) for column in places])]
        for row in places
    ]

    def step(_: Array, carry: Matrix) -> Matrix:
        return _columns([_divided(row, epsilon) for row in carry], epsilon)

    carry = lax.fori_loop(1, steps, step, _columns(carry, epsilon))
    for row in places:
        for column in places:
            plgpu.store(out_ref.at[at, row * size + column], carry[row][column], mask=there)


def _softmax(row: list[jax.Array]) -> list[jax.Array]:
    most = functools.reduce(jnp.maximum, row)
    return _divided([jnp.exp(each - most) for each in row], 0.0)


def _divided(row: list[jax.Array], epsilon: float) -> list[jax.Array]:
    total = functools.reduce(jnp.add, row) + epsilon
    return [each / total for each in row]


def _columns(carry: Matrix, epsilon: float) -> Matrix:
    """The same of every column."""
    columns = [_divided(list(column), epsilon) for column in zip(*carry, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]
