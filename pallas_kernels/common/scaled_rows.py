"""Rows whose leading numbers are 8-bit or 4-bit floats with a scale per group, the rest bfloat16.

The first two layouts are those of FlashMLA, so that rows can be exchanged with other systems:

    GLM and DeepSeek-V3.2, 656 B: 512 e4m3 | 4 float32 scales | 64 bfloat16
    DeepSeek-V4 entry,     584 B: 448 e4m3 | 64 bfloat16 | 7 e8m0 scales | 1 unused
    DeepSeek-V4.1 window,  528 B: 512 e4m3 | 16 e8m0 scales
    DeepSeek-V4.1 entry,   288 B: 512 e2m1 | 32 e4m3 scales
    4-bit index key,        68 B: 128 e2m1 | 4 e8m0 scales
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.common.e2m1 import E2M1_MAX, pack_e2m1, unpack_e2m1
from pallas_kernels.common.rows import WORD_BYTES

E4M3_MAX = 448.0
MANTISSA_BITS = 23
"""Of a float32; its exponent is stored as an e8m0 scale is."""
LEAST_SCALE = 2.0**-120
"""Of a group: zeros get it too, so that nothing is divided by zero."""
LEAST_E4M3 = 2.0**-9
"""The same where scales are e4m3: the least of these above zero."""


@dataclasses.dataclass(frozen=True)
class ScaledRow:
    """Format of a row in two precisions.

    Attributes:
        quantised: how many leading numbers are small; a multiple of `group`.
        group: numbers per scale.
        scale: "float32", before the rest; after it "e8m0", a power of two in a byte, or "e4m3".
        rest: how many numbers follow as bfloat16.
        power_scales: whether float32 scales are powers of two too, as those of DeepSeek-V3.2 are.
        numbers: what the small numbers are: "e4m3", or "e2m1", two in a byte.
    """

    quantised: int
    group: int
    scale: Literal["float32", "e8m0", "e4m3"]
    rest: int
    power_scales: bool = False
    numbers: Literal["e4m3", "e2m1"] = "e4m3"

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.quantised + self.rest

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.quantised // self.group

    @property
    def number_bytes(self) -> int:
        """Bytes of the small numbers."""
        return self.quantised if self.numbers == "e4m3" else self.quantised // 2

    @property
    def largest(self) -> float:
        """The largest of the small numbers."""
        return E4M3_MAX if self.numbers == "e4m3" else E2M1_MAX

    @property
    def rest_bytes(self) -> tuple[int, int]:
        """First byte of the rest, and the one after it."""
        first = self.number_bytes + (4 * self.groups if self.scale == "float32" else 0)
        return first, first + 2 * self.rest

    @property
    def scale_byte(self) -> int:
        """First byte of the scales."""
        return self.number_bytes if self.scale == "float32" else self.rest_bytes[1]

    @property
    def bytes(self) -> int:
        """Bytes of a row, filled up to words; with e4m3 to pairs of them, as FlashMLA does."""
        last = max(self.rest_bytes[1], self.scale_byte + self.groups)
        unit = 2 * WORD_BYTES if self.numbers == "e4m3" else WORD_BYTES
        return -(-last // unit) * unit

    @property
    def words(self) -> int:
        """int32 words of a row."""
        return self.bytes // WORD_BYTES


GLM_FP8 = ScaledRow(quantised=512, group=128, scale="float32", rest=64)
V4_ENTRY = ScaledRow(quantised=448, group=64, scale="e8m0", rest=64)
V41_WINDOW = ScaledRow(quantised=512, group=32, scale="e8m0", rest=0)
V41_ENTRY = ScaledRow(quantised=512, group=16, scale="e4m3", rest=0, numbers="e2m1")


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
    groups: Float[Array, "*n group"], *, power_scales: bool = False, largest: float = E4M3_MAX
) -> Float[Array, "*n"]:
    """The scale of each group that makes its largest number `largest`.

    With `power_scales` the next power of two that is not below it, so no number overflows.
    """
    # Not divided: compilers multiply with the inverse, but not wherever it is the same number.
    scales = jnp.maximum(jnp.abs(groups).max(axis=-1) * (1.0 / largest), LEAST_SCALE)
    if not power_scales:
        return scales
    # The bits of a logarithm differ between devices, those of a number do not.
    below = power_of_two(exponent_of(scales))
    return jnp.where(below < scales, 2.0 * below, scales)


def _small_scales_of(groups: Float[Array, "*n group"], largest: float) -> Float[Array, "*n"]:
    """The same, rounded to e4m3: so the largest number may be rounded to `largest` from above."""
    scales = jnp.maximum(jnp.abs(groups).max(axis=-1) * (1.0 / largest), LEAST_E4M3)
    return scales.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def rescaled(
    groups: Float[Array, "*n group"], scales: Float[Array, "*n"]
) -> Float[Array, "*n group"]:
    """The e4m3 numbers nearest to `groups / scales`."""
    return jnp.clip(groups / scales[..., None], -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def encode(values: Float[Array, "*n width"], row: ScaledRow) -> Int[Array, "*n words"]:
    """Rows in a format, as words; see `scales_of` for the scales, of which e8m0 ones are powers."""
    head = values[..., : row.quantised].astype(jnp.float32)
    groups = head.reshape(*head.shape[:-1], row.groups, row.group)
    if row.scale == "e4m3":
        scale = _small_scales_of(groups, row.largest)
        stored = _bytes(scale.astype(jnp.float8_e4m3fn))
    else:
        powers = row.scale == "e8m0" or row.power_scales
        scale = scales_of(groups, power_scales=powers, largest=row.largest)
        stored = exponent_of(scale).astype(jnp.uint8) if row.scale == "e8m0" else _bytes(scale)
    if row.numbers == "e4m3":
        numbers = _bytes(rescaled(groups, scale).reshape(head.shape))
    else:
        numbers = pack_e2m1((groups / scale[..., None]).reshape(head.shape))
    rest = _bytes(values[..., row.quantised :].astype(jnp.bfloat16))
    parts = [numbers, stored, rest] if row.scale == "float32" else [numbers, rest, stored]
    whole = jnp.concatenate(parts, axis=-1)
    whole = jnp.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, row.bytes - whole.shape[-1])])
    return lax.bitcast_convert_type(whole.reshape(*whole.shape[:-1], -1, WORD_BYTES), jnp.int32)


def decode(words: Int[Array, "*n words"], row: ScaledRow) -> Float[Array, "*n width"]:
    """The float32 numbers that rows stand for."""
    raw = _bytes(words)
    small = raw[..., : row.number_bytes]
    if row.numbers == "e4m3":
        numbers = lax.bitcast_convert_type(small, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        numbers = unpack_e2m1(small, jnp.float32)
    first, last = row.rest_bytes
    rest = raw[..., first:last].reshape(*raw.shape[:-1], row.rest, 2)
    if row.scale == "float32":
        stored = raw[..., row.scale_byte : row.scale_byte + 4 * row.groups]
        stored = stored.reshape(*raw.shape[:-1], row.groups, 4)
        scale = lax.bitcast_convert_type(stored, jnp.float32)
    else:
        stored = raw[..., row.scale_byte : row.scale_byte + row.groups]
        if row.scale == "e8m0":
            scale = power_of_two(stored.astype(jnp.int32))
        else:
            scale = lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32)
    head = numbers * jnp.repeat(scale, row.group, axis=-1)
    tail = lax.bitcast_convert_type(rest, jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([head, tail], axis=-1)
