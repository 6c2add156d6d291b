"""Quantised weights: what a checkpoint calls and stores them, and the numbers that they stand for.

The formats themselves are `configs.quantised`. Everything here works on rows of matrices
`[out, in]`, so that a large one never has to be in memory as a whole.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from dhisparse_jax.configs.quantised import WeightFormat
from dhisparse_jax.errors import UserError
from pallas_kernels.common.e2m1 import unpack_e2m1 as unpack

PACKED_BLOCK = (1, 32)
"""Block of 4-bit experts in every published checkpoint that has them."""

_PACKED = {"I8", "U8"}
_SCALES = {"F32": "float32", "F8_E8M0": "float8_e8m0fnu"}


class QuantisedTensor(NamedTuple):
    """A published matrix that is stored as numbers and scales.

    Attributes:
        scale: name of the tensor that holds its scales.
        shape: rows and columns of the matrix.
        weights: format of both tensors.
    """

    scale: str
    shape: tuple[int, int]
    weights: WeightFormat


def scale_names(name: str) -> tuple[str, str]:
    """What the scales of a weight may be called: as transformers does, and as DeepSeek does.

    In: `a.weight`. Out: `a.weight_scale_inv` and `a.scale`; both hold factors, not divisors.
    """
    return f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"


def is_quantised(dtype: str, expected: tuple[int, ...]) -> bool:
    """Whether a tensor of this safetensors dtype, meant to be `expected`, needs scales."""
    return len(expected) == 2 and dtype in _PACKED | {"F8_E4M3"}


def format_of(dtype: str, scale_dtype: str, block: tuple[int, int]) -> WeightFormat:
    """The format of numbers and scales of these safetensors dtypes.

    Args:
        dtype: of the numbers.
        scale_dtype: of the scales.
        block: rows and columns of a block of 8-bit numbers, from the configuration.

    Raises:
        UserError: scales cannot be of that dtype.
    """
    if scale_dtype not in _SCALES:
        raise UserError(f"scales are {scale_dtype}, not one of {', '.join(sorted(_SCALES))}")
    packed = dtype in _PACKED
    return WeightFormat(
        packed=packed, scale=_SCALES[scale_dtype], block=PACKED_BLOCK if packed else block
    )


def dequantise(
    numbers: Shaped[np.ndarray, "rows stored"],
    scales: Shaped[np.ndarray, "out_blocks in_blocks"],
    weights: WeightFormat,
    first: int = 0,
) -> Float[np.ndarray, "rows in"]:
    """Some rows of a matrix in float32: number times scale, rounded once.

    Args:
        numbers: the rows as stored.
        scales: of the whole matrix.
        weights: their format.
        first: number of the first row.
    """
    values = (unpack_e2m1(numbers) if weights.packed else numbers).astype(np.float32)
    rows, columns = np.arange(first, first + len(values)), np.arange(values.shape[1])
    blocks = scales[rows // weights.block[0]].astype(np.float32)
    values *= np.take(blocks, columns // weights.block[1], axis=1)
    return values


def unpack_e2m1(packed: Shaped[np.ndarray, "rows half"]) -> Shaped[np.ndarray, "rows in"]:
    """4-bit floats out of bytes: byte c holds number 2c in its low half and 2c + 1 in its high."""
    raw = packed.view(np.uint8)
    halves = np.stack((raw & 15, raw >> 4), axis=-1)
    return halves.reshape(len(raw), -1).view(ml_dtypes.float4_e2m1fn)


def decode_numbers(
    numbers: Shaped[Array, "*n stored"], weights: WeightFormat, dtype: DTypeLike
) -> Float[Array, "*n in"]:
    """The numbers without their scales, on a device: exact in bfloat16 and float32."""
    if not weights.packed:
        return numbers.astype(dtype)
    return unpack(jax.lax.bitcast_convert_type(numbers, jnp.uint8), dtype)
