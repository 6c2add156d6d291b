"""How records lie in memory: as words, or on a TPU as whole tiles. The one place that decides it.

A TPU lays an array out in tiles of 8 x 128 words, and moves whole tiles between its memory and the
host. So a record is whole tiles there, 4 KB each, and a pool an array `[N, 8 k, 128]`: its bytes
are those of N records one after the other, and so are those of the views that kernels take of it,
which the compiler makes without moving a byte (`lanes_view`, `lines_view`). A row starts at a whole
line of 128 words, so that a kernel reads it without shifting: the four rows of 656 B of a record of
GLM-5.3 have two lines each, and fill one tile.

Anywhere else a pool is `[N, W]`, and a record is padded to 128 bytes.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.common.backends import target

LANES = 128
"""Words of a line of a tile."""

LINES = 8
"""Lines of a tile."""


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """How records lie in memory.

    Attributes:
        name: what it is called.
        row_unit: words; the rows of a record start at multiples of it.
        record_unit: words; the size of a record is a multiple of it.
        line: words of the last dimension of a pool, if a record is more than one dimension.
    """

    name: str
    row_unit: int
    record_unit: int
    line: int | None = None

    def row_stride(self, words: int) -> int:
        """Words from one row of a record to the next, for rows of so many words."""
        return -(-words // self.row_unit) * self.row_unit

    def record_words(self, rows: int, words: int) -> int:
        """Words of a record of so many rows, padding included."""
        return -(-rows * self.row_stride(words) // self.record_unit) * self.record_unit

    def shape(self, words: int) -> tuple[int, ...]:
        """Dimensions of a record of so many words, which are whole units."""
        return (words,) if self.line is None else (words // self.line, self.line)


WORDS = RecordLayout("words", row_unit=1, record_unit=32)
"""TMA wants 128-byte aligned destinations, so records are padded to it."""

TILES = RecordLayout("tiles", row_unit=LANES, record_unit=LINES * LANES, line=LANES)


def record_layout(platform: str | None = None) -> RecordLayout:
    """How records lie in the memory of `platform` (default: what programs are made for)."""
    return TILES if (platform or target().platform) == "tpu" else WORDS


def layout_of(pool: Int[Array, "N *W"]) -> RecordLayout:
    """How the records of a pool lie."""
    return WORDS if pool.ndim == 2 else TILES


def words_of_record(pool: Int[Array, "N *W"]) -> int:
    """Words of a record of a pool."""
    return math.prod(pool.shape[1:])


def placed_words(
    words: Shaped[Array, "*n width"], offset: int | Int[Array, ""], like: RecordLayout
) -> tuple[Shaped[Array, "*m"], tuple[int | Int[Array, ""], ...]]:
    """Words that start at word `offset` of a record, in the dimensions of a record.

    Returns:
        The words, as whole lines where a record has lines (with zeros after them), and where they
        start in each dimension of a record.
    """
    if like.line is None:
        return words, (offset,)
    missing = -words.shape[-1] % like.line
    padded = jnp.pad(words, ((0, 0),) * (words.ndim - 1) + ((0, missing),))
    return padded.reshape(*words.shape[:-1], -1, like.line), (offset // like.line, 0)


def as_words(records: Int[Array, "*n"], like: RecordLayout) -> Int[Array, "*m"]:
    """Records of a layout as `[.., W]`. Not for whole pools on a TPU, where it moves every byte."""
    return records if like.line is None else records.reshape(*records.shape[:-2], -1)


def as_records(words: Int[Array, "*n W"], like: RecordLayout) -> Int[Array, "*m"]:
    """The reverse of `as_words`; words are padded with zeros to a whole record."""
    size = words.shape[-1]
    missing = like.record_words(1, size) - size
    padded = jnp.pad(words, ((0, 0),) * (words.ndim - 1) + ((0, missing),))
    return padded.reshape(*words.shape[:-1], *like.shape(size + missing))


def lanes_view(pool: Int[Array, "N lines 128"]) -> Int[Array, "8 lanes"]:
    """A pool of tiles as one row of tiles: record i has the columns `[i * W // 8, W // 8]`.

    The form in which libtpu takes single tiles of host memory (2026-11): it counts host memory in
    units of 4 KB, and of an array whose last dimension is 128 it computes addresses from the number
    of a line, of 512 B ("multiplier_in_bytes % word_size == 0 (512 == 0)").
    """
    tiles = pool.reshape(-1, LINES, LANES)
    return tiles.transpose(1, 0, 2).reshape(LINES, -1)


def pool_of(
    view: Int[Array, "8 lanes"], like: Int[Array, "N lines 128"]
) -> Int[Array, "N lines 128"]:
    """The reverse of `lanes_view`: the pool that a view is of, as large as `like`."""
    return view.reshape(LINES, -1, LANES).transpose(1, 0, 2).reshape(like.shape)


def lines_view(pool: Int[Array, "N lines 128"]) -> Int[Array, "n 1 128"]:
    """A pool of tiles as single lines: record i has lines `[i * W // 128, W // 128]`.

    In device memory a kernel can copy any number of lines of it to VMEM: one row of a record.
    """
    return pool.reshape(-1, 1, LANES)
