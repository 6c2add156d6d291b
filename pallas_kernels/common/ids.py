"""The invalid id. Every position, slot and page id is an int32 that is >= 0 or equals NO_SLOT."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NO_SLOT = -1
"""Marks "no slot", "no position" and "no page" in every index array."""

INT32_MAX = 2**31 - 1


def masked(ids: Int[Array, "*n"], keep: Bool[Array, "*n"]) -> Int[Array, "*n"]:
    """`ids` where `keep`, NO_SLOT elsewhere."""
    return jnp.where(keep, ids, NO_SLOT)


def dropping(ids: Int[Array, "*n"], size: int) -> Int[Array, "*n"]:
    """Scatter indices for `mode="drop"`: NO_SLOT becomes `size`, which is out of bounds.

    A negative index would wrap around: with size 4, index -1 writes row 3; index 4 writes nothing.
    """
    return jnp.where(ids < 0, size, ids)


POISON = -1
"""The word of a record that does not exist: all bits set, a NaN in float32, bfloat16 and float8."""


def in_range(ids: Int[Array, "*n"], size: int) -> Bool[Array, "*n"]:
    """Whether each id names one of `size` things."""
    return (ids >= 0) & (ids < size)


def first_of(ids: Int[Array, "R n"], count: int) -> Int[Array, "R count"]:
    """The first `count` valid ids of each row, in their order; NO_SLOT after them.

    As `packed`, for short rows: all places are compared with all, in one kernel on a GPU where
    a scan and a scatter are several. [-1, 7, -1, 5, 9] has its valid ids at the places 0, 1 and 2.
    """
    number = jnp.arange(ids.shape[1], dtype=jnp.int32)
    place = ((ids >= 0)[:, None] & (number[None] < number[:, None])[None]).sum(-1, dtype=jnp.int32)
    wanted = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    here = (place[:, None] == wanted) & (ids >= 0)[:, None]
    return jnp.where(here, ids[:, None], NO_SLOT).max(axis=-1)


def packed(keep: Bool[Array, "R n"], ids: Int[Array, "R n"]) -> Int[Array, "R n"]:
    """The ids to keep at the front of each row, in their order; NO_SLOT after them."""
    row = jnp.broadcast_to(jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids.shape)
    place = masked(jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1, keep)
    empty = jnp.full_like(ids, NO_SLOT)
    return empty.at[row, dropping(place, ids.shape[1])].set(ids, mode="drop")
