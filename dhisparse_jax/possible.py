"""Whether sizes can be: what a person may have written, refused before anything is made of it."""

import math

import jax.numpy as jnp
import numpy as np

from dhisparse_jax.errors import UserError
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.common.scaled_rows import ScaledRow

MOST_INT32 = 2**31 - 1
"""Positions, slots and rows are numbered in int32."""

OPAQUE = "uint8"
"""The dtype of rows that are bytes to the library."""

ROW_DTYPES = ("float32", "bfloat16", OPAQUE)
"""What rows may be made of, beside numbers of two precisions."""


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Whether a size is a whole number that int32 holds.

    Args:
        name: of the size.
        value: what was given.
        least: it must be at least so much.

    Raises:
        UserError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UserError(f"{name} is {value!r}; it must be a whole number")
    if not least <= value <= MOST_INT32:
        limit = f"at least {least}" if value < least else f"at most {MOST_INT32:,}"
        raise UserError(f"{name} is {value}; it must be {limit}")


def check_row(width: int, value_width: int, dtype: str | ScaledRow, kv_heads: int | None) -> None:
    """Whether there are rows of a format, and they are whole words; see `RowFormat`.

    Raises:
        UserError: another width than that of its dtype, a value that is not in the row, or a part
            of a row that is not whole words.
    """
    parts = 1 if kv_heads is None else kv_heads
    check_whole("kv_heads", parts)
    check_whole("the width of a row", width)
    if isinstance(dtype, ScaledRow):
        if dtype.width != width:
            raise UserError(f"rows of {width} numbers have a format for {dtype.width}")
        check_whole("the quantised part of a row", dtype.quantised)
        check_whole("the part of a row after it", dtype.rest, least=0)
    elif dtype not in ROW_DTYPES:
        raise UserError(f"rows of {dtype!r}; there are {', '.join(ROW_DTYPES)}, and fp8")
    elif width % parts or width // parts * jnp.dtype(dtype).itemsize % WORD_BYTES:
        raise UserError(
            f"a row of {width} x {dtype} in {parts} parts is not whole words of {WORD_BYTES} "
            "bytes each; pad it"
        )
    check_whole("the value of a row", value_width, least=0)
    if value_width > width // parts - (kv_heads is not None):
        key = "" if kv_heads is None else ", and a key has at least 1"
        raise UserError(
            f"a value of {value_width} numbers is not in a row that has {width // parts} for it"
            f"{key}"
        )


def check_groups(groups: object) -> None:
    """Whether these are numbers of layers. Raises UserError where they are not."""
    if not isinstance(groups, tuple) or not groups:
        raise UserError(f"layers_per_pool is {groups!r}; a group has layers, as in (1, 2)")
    for layers in groups:
        check_whole(f"a group in layers_per_pool {groups}", layers)


def check_number(name: str, value: object) -> None:
    """Whether it is a number, and finite. Raises UserError where it is not."""
    if not isinstance(value, int | float | np.floating) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}; it must be a number")
