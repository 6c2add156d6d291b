"""Rows as packed words: pools hold int32, typed views are made where rows are written or read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from pallas_kernels.common.ids import POISON, in_range
from pallas_kernels.common.record_layout import layout_of, placed_words

WORD_BYTES = 4


def words_of(width: int, dtype: DTypeLike) -> int:
    """Number of int32 words that `width` numbers of `dtype` take.

    Raises:
        ValueError: if the numbers do not fill whole words.
    """
    size = width * jnp.dtype(dtype).itemsize
    if size % WORD_BYTES:
        raise ValueError(f"a row of {width} x {jnp.dtype(dtype)} is {size} bytes, not whole words")
    return size // WORD_BYTES


def pack(values: Shaped[Array, "*n width"]) -> Int[Array, "*n words"]:
    """The bytes of `values` as int32 words. bf16: word i holds numbers 2i (low half) and 2i + 1."""
    per_word = WORD_BYTES // values.dtype.itemsize
    if per_word > 1:
        values = values.reshape(*values.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(values, jnp.int32)


def unpack(words: Int[Array, "*n words"], dtype: DTypeLike) -> Shaped[Array, "*n width"]:
    """The inverse of `pack`: int32 words seen as numbers of `dtype`."""
    values = lax.bitcast_convert_type(words, dtype)
    return values if values.ndim == words.ndim else values.reshape(*words.shape[:-1], -1)


def gather_words(
    table: Shaped[Array, "n *words"],
    rows: Int[Array, "*m"],
    offset: int | Int[Array, ""],
    width: int,
) -> Shaped[Array, "*m width"]:
    """`table[rows, offset:offset + width]` as one gather: the other words are not read.

    Of tiles (`record_layout`) whole lines are read. `rows` must be in bounds (mask NO_SLOT to 0
    before, and the result after).
    """
    if table.ndim > 2:
        return _gather_lines(table, rows, jnp.asarray(offset, jnp.int32), width)
    take = lambda row: lax.dynamic_slice(table, (row, jnp.int32(offset)), (1, width))[0]
    flat = jax.vmap(take)(rows.reshape(-1))
    return flat.reshape(*rows.shape, width)


def _gather_lines(
    table: Shaped[Array, "n lines lane"],
    rows: Int[Array, "*m"],
    offset: Int[Array, ""],
    width: int,
) -> Shaped[Array, "*m width"]:
    """`gather_words` of records that are lines of words."""
    _, lines, lane = table.shape
    count = min(-(-width // lane) + 1, lines)  # a row that starts within a line may end in one more
    first = jnp.minimum(offset // lane, lines - count)
    take = lambda row: lax.dynamic_slice(table, (row, first, jnp.int32(0)), (1, count, lane))
    found = jax.vmap(take)(rows.reshape(-1)).reshape(*rows.shape, count * lane)
    return lax.dynamic_slice_in_dim(found, offset - first * lane, width, axis=-1)


def write_words(
    table: Shaped[Array, "n *words"],
    rows: Int[Array, "*m"],
    offset: int | Int[Array, ""],
    words: Shaped[Array, "*m width"],
) -> Shaped[Array, "n *words"]:
    """`table[rows, offset:offset + width] = words`; rows out of bounds are dropped.

    Tiles (`record_layout`) are written by whole lines, where a row has lines of its own: what is
    left of the last one is zeros then.
    """
    new, (first, *_) = placed_words(words, offset, layout_of(table))
    column = first + jnp.arange(new.shape[rows.ndim], dtype=jnp.int32)
    place = rows[..., None], column.reshape(*(1,) * rows.ndim, -1)
    return table.at[place].set(new, mode="drop")


def records_at(table: Int[Array, "n *words"], rows: Int[Array, " m"]) -> Int[Array, "m *words"]:
    """`table[rows]`; a row that the table does not have is POISON."""
    found = in_range(rows, table.shape[0])
    records = table.at[jnp.where(found, rows, 0)].get(mode="clip")
    return jnp.where(found.reshape(-1, *(1,) * (table.ndim - 1)), records, POISON)
