"""Replacing one part of the nested state: the only place that knows how it nests."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from dhisparse_jax.hierarchy.state import HierarchyState, HotPool


def with_pool(state: HierarchyState, pool: int, **fields: Any) -> HierarchyState:  # noqa: ANN401
    """`state` with the given fields of pool `pool` replaced."""
    new = dataclasses.replace(state.pools[pool], **fields)
    return dataclasses.replace(state, pools=(*state.pools[:pool], new, *state.pools[pool + 1 :]))


def with_row(
    every: Shaped[Array, "pools *n"], pool: int | Int[Array, ""], row: Shaped[Array, "*n"]
) -> Shaped[Array, "pools *n"]:
    """`every` with the row of pool `pool` replaced, for arrays of a few numbers per pool.

    A select and not an update: on a GPU, XLA makes an update of a few numbers a copy of its own on
    another stream, which also cuts the graph of kernels that is launched as one; a select becomes
    part of the kernels around it.
    """
    here = jnp.arange(every.shape[0], dtype=jnp.int32) == pool
    return jnp.where(here.reshape(-1, *(1,) * row.ndim), row[None], every)


def with_hot(state: HierarchyState, number: int, hot: HotPool) -> HierarchyState:
    """`state` with hot pool `number` replaced."""
    return dataclasses.replace(state, hot=(*state.hot[:number], hot, *state.hot[number + 1 :]))


def with_hot_slots(state: HierarchyState, number: int, slots: Int[Array, "S *W"]) -> HierarchyState:
    """`state` with the records of hot pool `number` replaced."""
    return with_hot(state, number, dataclasses.replace(state.hot[number], slots=slots))
