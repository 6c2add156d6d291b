"""Rows as a model has them, and as one run of numbers, which is what is stored."""

from typing import Never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import RowFormat

Rows = Shaped[Array, "..."] | tuple[Shaped[Array, "..."], ...]
"""Rows of one layer: `[..., width]` numbers (MLA) or bytes; or the keys `[..., heads, key]` and the
values `[..., heads, value]` of all heads (GQA). Their shapes are checked here, with a message."""


def flat(row: RowFormat, rows: Rows, lead: tuple[int, ...]) -> Shaped[Array, "*n width"]:
    """The numbers of rows.

    Args:
        row: their format.
        rows: the rows.
        lead: shape of their leading axes.

    Raises:
        UserError: they do not have the format, or a gradient is asked of them.
    """
    if row.kv_heads is None:
        if isinstance(rows, tuple):
            raise UserError(f"rows are one array of {row.width} numbers, not {len(rows)} arrays")
        _check("rows", rows, (*lead, row.width), row)
        return _without_gradient(rows)
    if not isinstance(rows, tuple) or len(rows) != 2:
        raise UserError("rows of keys and values are a pair of arrays: (keys, values)")
    keys, values = rows
    _check("keys", keys, (*lead, row.kv_heads, row.query_width), row)
    _check("values", values, (*lead, row.kv_heads, row.value_width), row)
    numbers = jnp.concatenate((values, keys), axis=-1).reshape(*lead, row.width)
    return _without_gradient(numbers)


@jax.custom_jvp
def _without_gradient(numbers: Shaped[Array, "*n width"]) -> Shaped[Array, "*n width"]:
    return numbers


@_without_gradient.defjvp
def _refused(*_: object) -> Never:
    """A gradient would be that of everything but the rows, and nobody would see it."""
    raise UserError(
        "rows are stored as bytes and have no gradient; differentiate the model without a "
        "hierarchy, or give it jax.lax.stop_gradient(row)"
    )


def unflat(row: RowFormat, numbers: Shaped[Array, "*n width"]) -> Rows:
    """The reverse of `flat`."""
    if row.kv_heads is None:
        return numbers
    parts = numbers.reshape(*numbers.shape[:-1], row.kv_heads, -1)
    return parts[..., row.value_width :], parts[..., : row.value_width]


def shape_of(what: str, array: object) -> tuple[int, ...]:
    """The shape of an array. Raises UserError where it is none, as a list of numbers is not."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise UserError(f"{what} are a {type(array).__name__}; they must be an array")
    return shape


def _check(what: str, array: Array, shape: tuple[int, ...], row: RowFormat) -> None:
    if shape_of(what, array) != shape:
        raise UserError(f"{what} have shape {array.shape}; the row format says {shape}")
    if isinstance(row.dtype, str) and array.dtype != jnp.dtype(row.dtype):
        raise UserError(
            f"{what} are {array.dtype}; the row format says {row.dtype}: cast them, or change it"
        )
