"""Rows of words as matrices of numbers in a TPU kernel, without moving a number between lanes.

A word holds several numbers (two of bfloat16, four of e4m3), and to spread them over neighbouring
lanes would be a shuffle. So a row becomes planes instead: plane j has number j of every word, in
the word's lane. The queries are laid out in the same way, once and outside of the kernel, so that
the product over all lanes of all planes is that of the rows; and the values come out as planes,
which are put together outside.

With two numbers to a word and words of 0 1, 2 3 and 4 5, the planes are 0 2 4 and 1 3 5.

Lanes of a plane that hold something else (scales, the other part of the row) are zeros on either
side: what is there could be NaN.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.record_layout import LANES
from pallas_kernels.common.rows import WORD_BYTES, words_of
from pallas_kernels.common.scaled_rows import MANTISSA_BITS, ScaledRow, power_of_two

NAN = 0x7FC00000
"""Bits of a float32."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of numbers of one kind in a row.

    Attributes:
        kind: of the numbers.
        number: which is the first.
        count: how many; whole words of them.
        word: the first word.
        scaled: whether a number is to be multiplied with its scale.
    """

    kind: str
    number: int
    count: int
    word: int
    scaled: bool = False

    @property
    def per_word(self) -> int:
        """Numbers of a word."""
        return {"float32": 1, "bfloat16": 2, "e4m3": 4, "e2m1": 8}[self.kind]

    @property
    def words(self) -> int:
        """Words of the run."""
        return self.count // self.per_word

    @property
    def first_lane(self) -> int:
        """Lane of the row in which its planes begin: that of a tile."""
        return self.word // LANES * LANES

    @property
    def before(self) -> int:
        """Lanes of a plane before the first number."""
        return self.word - self.first_lane

    @property
    def lanes(self) -> int:
        """Lanes of a plane: whole tiles."""
        return -(-(self.before + self.words) // LANES) * LANES

    def value_part(self, value_width: int) -> "Part":
        """As much of it as belongs to the value, in whole words."""
        count = min(self.count, max(0, value_width - self.number))
        return dataclasses.replace(self, count=-(-count // self.per_word) * self.per_word)


def row_words(width: int, row_format: DTypeLike | ScaledRow) -> int:
    """Words of a row."""
    if isinstance(row_format, ScaledRow):
        return row_format.words
    return words_of(width, row_format)


def parts(width: int, row_format: DTypeLike | ScaledRow) -> list[Part]:
    """What a row consists of."""
    if not isinstance(row_format, ScaledRow):
        return [Part(jnp.dtype(row_format).name, 0, width, 0)]
    quantised, rest = row_format.quantised, row_format.rest
    found = [Part(row_format.numbers, 0, quantised, 0, scaled=True)]
    if rest:
        first = row_format.rest_bytes[0] // WORD_BYTES
        found.append(Part("bfloat16", quantised, rest, first))
    return found


def refusal(width: int, row_format: DTypeLike | ScaledRow) -> str | None:
    """Why rows of a format cannot be taken apart; None if they can."""
    if not isinstance(row_format, ScaledRow):
        name = jnp.dtype(row_format).name
        return None if name in ("float32", "bfloat16") else f"rows of {name}"
    head = parts(width, row_format)[0]
    whole = row_format.group % head.per_word == 0 and row_format.rest % 2 == 0
    if whole and row_format.rest_bytes[0] % WORD_BYTES == 0:
        return None
    return f"rows with groups of {row_format.group} and a rest of {row_format.rest} (whole words)"


def to_planes(array: Float[Array, "*n width"], found: list[Part]) -> Float[Array, "*n lanes"]:
    """Numbers, one after the other, as the planes of a row."""
    return _taken(array, numbers_of_lanes(found, array.shape[-1]))


def from_planes(array: Float[Array, "*n lanes"], found: list[Part]) -> Float[Array, "*n width"]:
    """The inverse of `to_planes`."""
    width = sum(part.count for part in found)
    lane_of = np.zeros(width, np.int32)
    numbers = numbers_of_lanes(found, width)
    lane_of[numbers[numbers >= 0]] = np.flatnonzero(numbers >= 0)
    return _taken(array, lane_of)


def numbers_of_lanes(found: list[Part], width: int) -> Int[np.ndarray, " lanes"]:
    """Which of `width` numbers each lane of the planes has; NO_SLOT for none."""
    planes = []
    for part in found:
        for which in range(part.per_word):
            plane = np.full(part.lanes, NO_SLOT, np.int32)
            of_words = part.number + which + part.per_word * np.arange(part.words)
            plane[part.before : part.before + part.words] = of_words
            planes.append(plane)
    every = np.concatenate(planes)
    return np.where(every < width, every, NO_SLOT)


def _taken(
    array: Float[Array, "*n width"], index: Int[np.ndarray, " lanes"]
) -> Float[Array, "*n lanes"]:
    """`array[..., index]`, zero where there is none: a product with ones and zeros, and so exact.

    XLA on a TPU takes every second lane by reading the array many times over, and gathers slowly.
    """
    source = jnp.arange(array.shape[-1], dtype=jnp.int32)[:, None]
    ones = (source == jnp.asarray(index)[None]).astype(array.dtype)
    return jnp.matmul(
        array, ones, precision=lax.Precision.HIGHEST, preferred_element_type=array.dtype
    )


def decoded(
    words: Int[Array, "n lanes"],
    found: list[Part],
    row_format: DTypeLike | ScaledRow,
    dtype: DTypeLike,
) -> Float[Array, "n planes"]:
    """The planes of rows whose words begin in lane 0, next to each other, rounded to `dtype`."""
    planes = []
    for part in found:
        lanes = words[:, part.first_lane : part.first_lane + part.lanes]
        scale = None
        if part.scaled and isinstance(row_format, ScaledRow):
            scale = _scales(words, part, row_format)
        lane = lax.broadcasted_iota(jnp.int32, lanes.shape, 1)
        inside = (lane >= part.before) & (lane < part.before + part.words)
        for which in range(part.per_word):
            numbers = _numbers(lanes, part.kind, which)
            numbers = numbers if scale is None else numbers * scale
            if part.words != part.lanes:
                numbers = jnp.where(inside, numbers, 0.0)
            planes.append(numbers.astype(dtype))
    return jnp.concatenate(planes, axis=1)


def _scales(words: Int[Array, "n words"], part: Part, row: ScaledRow) -> Float[Array, "n lanes"]:
    """The scale of the numbers of each lane; the part begins in lane 0."""
    lane = lax.broadcasted_iota(jnp.int32, (words.shape[0], part.lanes), 1)
    per_group = row.group // part.per_word
    scales = jnp.zeros(lane.shape, jnp.float32)
    each = WORD_BYTES if row.scale == "float32" else 1
    for group in range(row.groups):
        word, byte = divmod(row.scale_byte + group * each, WORD_BYTES)
        column = words[:, word : word + 1]
        if row.scale == "float32":
            scale = lax.bitcast_convert_type(column, jnp.float32)
        elif row.scale == "e8m0":
            scale = power_of_two((column >> (8 * byte)) & 0xFF)
        else:
            scale = _numbers(column, "e4m3", byte)
        scales = jnp.where(lane // per_group == group, scale, scales)
    return scales


def _numbers(words: Int[Array, "n lanes"], kind: str, which: int) -> Float[Array, "n lanes"]:
    """One number of every word, in float32.

    With integers, since a v5e converts no float8. What is below the normal numbers of e4m3 is an
    integer times 2^-9: as a float32 it would be subnormal before it is scaled, and be lost.
    """
    if kind == "float32":
        bits = words
    elif kind == "bfloat16":
        bits = words << 16 if which == 0 else words & -(1 << 16)
    elif kind == "e4m3":
        byte = words >> (8 * which)
        size = byte & 0x7F
        small = lax.bitcast_convert_type(size.astype(jnp.float32) * 2.0**-9, jnp.int32)
        bits = jnp.where(size < 8, small, (size << 20) + (120 << MANTISSA_BITS))
        bits = jnp.where(size == 0x7F, NAN, bits) | ((byte & 0x80) << 24)
    else:
        half = words >> (4 * which)
        size = half & 0x7
        small = lax.bitcast_convert_type(size.astype(jnp.float32) * 0.5, jnp.int32)
        bits = jnp.where(size < 2, small, (size << 22) + (126 << MANTISSA_BITS))
        bits = bits | ((half & 0x8) << 28)
    return lax.bitcast_convert_type(bits, jnp.float32)


def aligned(words: Int[Array, "n given"], start: int) -> Int[Array, "n lanes"]:
    """Words with that of lane `start` in lane 0, in whole tiles."""
    missing = -words.shape[1] % LANES
    if missing:
        words = jnp.concatenate([words, jnp.zeros((words.shape[0], missing), words.dtype)], axis=1)
    return pltpu.roll(words, words.shape[1] - start, 1) if start else words
