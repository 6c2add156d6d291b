"""Rows whose leading numbers are 8-bit floats with a scale per group, and the rest bfloat16.

The layouts are those of FlashMLA, so that rows can be exchanged with other systems:

    GLM and DeepSeek-V3.2, 656 B: 512 e4m3 | 4 float32 scales | 64 bfloat16
    DeepSeek-V4 entry,     584 B: 448 e4m3 | 64 bfloat16 | 7 e8m0 scales | 1 unused
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.common.rows import WORD_BYTES

E4M3_MAX = 448.0
MANTISSA_BITS = 23
"""Of a float32; its exponent is stored as an e8m0 scale is."""
LEAST_SCALE = 2.0**-120
"""Of a group: zeros get it too, so that nothing is divided by zero."""


@dataclasses.dataclass(frozen=True)
class ScaledRow:
    """Format of a row in two precisions.

    Attributes:
        quantised: how many leading numbers are e4m3; a multiple of `group`.
        group: numbers per scale.
        scale: "float32", before the rest, or "e8m0" (a power of two in a byte), after it.
        rest: how many numbers follow as bfloat16.
        power_scales: whether float32 scales are powers of two too, as those of DeepSeek-V3.2 are.
    """

    quantised: int
    group: int
    scale: Literal["float32", "e8m0"]
    rest: int
    power_scales: bool = False

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.quantised + self.rest

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.quantised // self.group

    @property
    def rest_bytes(self) -> tuple[int, int]:
        """First byte of the rest, and the one after it."""
        first = self.quantised + (4 * self.groups if self.scale == "float32" else 0)
        return first, first + 2 * self.rest

    @property
    def scale_byte(self) -> int:
        """First byte of the scales."""
        return self.quantised if self.scale == "float32" else self.rest_bytes[1]

    @property
    def bytes(self) -> int:
        """Bytes of a row, filled up to whole words."""
        last = max(self.rest_bytes[1], self.scale_byte + self.groups)
        return -(-last // 8) * 8

    @property
    def words(self) -> int:
        """int32 words of a row."""
        return self.bytes // WORD_BYTES


GLM_FP8 = ScaledRow(quantised=512, group=128, scale="float32", rest=64)
V4_ENTRY = ScaledRow(quantised=448, group=64, scale="e8m0", rest=64)


def _bytes(array: Array) -> UInt8[Array, "*n bytes"]:
    """The bytes of an array's last axis."""
    raw = lax.bitcast_convert_type(array, jnp.uint8)
    return raw if raw.ndim == array.ndim else raw.reshape(*array.shape[:-1], -1)


def power_of_two(exponent: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """float32 with these bits as exponent: `exp2` of integers is not exact on every device."""
    return lax.bitcast_convert_type(exponent << MANTISSA_BITS, jnp.float32)


def exponent_of(values: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """The reverse of `power_of_two`; 255 of what is not finite. For float32 numbers above zero."""
    return lax.bitcast_convert_type(values, jnp.int32) >> MANTISSA_BITS


def scales_of(
    groups: Float[Array, "*n group"], *, power_scales: bool = False
) -> Float[Array, "*n"]:
    """The scale of each group that makes its largest number the largest e4m3.

    With `power_scales` the next power of two that is not below it, so no number overflows.
    """
    # Not divided: compilers multiply with the inverse, but not wherever it is the same number.
    scales = jnp.maximum(jnp.abs(groups).max(axis=-1) * (1.0 / E4M3_MAX), LEAST_SCALE)
    if not power_scales:
        return scales
    # The bits of a logarithm differ between devices, those of a number do not.
    below = power_of_two(exponent_of(scales))
    return jnp.where(below < scales, 2.0 * below, scales)


def rescaled(
    groups: Float[Array, "*n group"], scales: Float[Array, "*n"]
) -> Float[Array, "*n group"]:
    """The e4m3 numbers nearest to `groups / scales`."""
    return jnp.clip(groups / scales[..., None], -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def encode(values: Float[Array, "*n width"], row: ScaledRow) -> Int[Array, "*n words"]:
    """Rows in a format, as words; see `scales_of` for the scales, of which e8m0 ones are powers."""
    head = values[..., : row.quantised].astype(jnp.float32)
    groups = head.reshape(*head.shape[:-1], row.groups, row.group)
    e8m0 = row.scale == "e8m0"
    scale = scales_of(groups, power_scales=e8m0 or row.power_scales)
    stored = exponent_of(scale).astype(jnp.uint8) if e8m0 else _bytes(scale)
    numbers = _bytes(rescaled(groups, scale).reshape(head.shape))
    rest = _bytes(values[..., row.quantised :].astype(jnp.bfloat16))
    parts = [numbers, rest, stored] if e8m0 else [numbers, stored, rest]
    whole = jnp.concatenate(parts, axis=-1)
    whole = jnp.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, row.bytes - whole.shape[-1])])
    return lax.bitcast_convert_type(whole.reshape(*whole.shape[:-1], -1, WORD_BYTES), jnp.int32)


def decode(words: Int[Array, "*n words"], row: ScaledRow) -> Float[Array, "*n width"]:
    """The float32 numbers that rows stand for."""
    raw = _bytes(words)
    numbers = lax.bitcast_convert_type(raw[..., : row.quantised], jnp.float8_e4m3fn)
    first, last = row.rest_bytes
    rest = raw[..., first:last].reshape(*raw.shape[:-1], row.rest, 2)
    if row.scale == "float32":
        stored = raw[..., row.scale_byte : row.scale_byte + 4 * row.groups]
        stored = stored.reshape(*raw.shape[:-1], row.groups, 4)
        scale = lax.bitcast_convert_type(stored, jnp.float32)
    else:
        exponent = raw[..., row.scale_byte : row.scale_byte + row.groups].astype(jnp.int32)
        scale = power_of_two(exponent)
    head = numbers.astype(jnp.float32) * jnp.repeat(scale, row.group, axis=-1)
    tail = lax.bitcast_convert_type(rest, jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([head, tail], axis=-1)
