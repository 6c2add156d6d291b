"""Quantised tensors and files of them, made here with NumPy alone; the oracle number by number."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from dhisparse_jax.configs.quantised import WeightFormat

NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, written by hand: the package does not take 8-bit floats."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        dtype, shape = NAMES[tensor.dtype.name], list(tensor.shape)
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def quantise(values, weights: WeightFormat):
    """Numbers and scales of a matrix; the largest number of a block becomes the largest one."""
    rows, columns = values.shape
    largest = 6.0 if weights.packed else 448.0
    shape = weights.scale_shape(rows, columns)
    scales = np.ones(shape, np.float32)
    for i, j in np.ndindex(shape):
        peak = np.abs(values[block(weights, i, j)]).max()
        scales[i, j] = peak / largest if peak else 1.0
    if weights.scale == "float8_e8m0fnu":
        scales = np.exp2(np.ceil(np.log2(scales)))
    scaled = np.zeros_like(values, dtype=np.float32)
    for i, j in np.ndindex(shape):
        scaled[block(weights, i, j)] = values[block(weights, i, j)] / scales[i, j]
    scales = scales.astype(weights.scale)
    return (pack(scaled) if weights.packed else scaled.astype(ml_dtypes.float8_e4m3fn)), scales


def pack(values):
    """Two 4-bit floats a byte, the first in the low half."""
    nibbles = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)


def block(weights: WeightFormat, i, j):
    height, width = weights.block
    return slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)


def exact(numbers, scales, weights: WeightFormat):
    """The oracle: the matrix in float64, one number after the other."""
    raw = numbers.view(np.uint8)
    rows, columns = raw.shape[0], raw.shape[1] * (2 if weights.packed else 1)
    values = np.empty((rows, columns))
    for i, j in np.ndindex(rows, columns):
        byte = int(raw[i, j // 2] if weights.packed else raw[i, j])
        number = e2m1(byte >> 4 * (j % 2) & 15) if weights.packed else e4m3(byte)
        scale = scales[i // weights.block[0], j // weights.block[1]]
        if weights.scale == "float8_e8m0fnu":
            scale = math.ldexp(1.0, int(scale.view(np.uint8)) - 127)
        values[i, j] = number * float(scale)
    return values


def e4m3(byte: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = math.ldexp(mantissa / 8 + (exponent > 0), max(exponent, 1) - 7)
    return -size if byte >> 7 else size


def e2m1(nibble: int) -> float:
    return -E2M1[nibble & 7] if nibble >> 3 else float(E2M1[nibble & 7])
