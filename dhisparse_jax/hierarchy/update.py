"""Replacing one part of the nested state: the only place that knows how it nests."""

import dataclasses
from typing import Any

from jaxtyping import Array, Int

from dhisparse_jax.hierarchy.state import HierarchyState, HotPool


def with_pool(state: HierarchyState, pool: int, **fields: Any) -> HierarchyState:  # noqa: ANN401
    """`state` with the given fields of pool `pool` replaced."""
    new = dataclasses.replace(state.pools[pool], **fields)
    return dataclasses.replace(state, pools=(*state.pools[:pool], new, *state.pools[pool + 1 :]))


def with_hot(state: HierarchyState, number: int, hot: HotPool) -> HierarchyState:
    """`state` with hot pool `number` replaced."""
    return dataclasses.replace(state, hot=(*state.hot[:number], hot, *state.hot[number + 1 :]))


def with_hot_slots(state: HierarchyState, number: int, slots: Int[Array, "S W"]) -> HierarchyState:
    """`state` with the records of hot pool `number` replaced."""
    return with_hot(state, number, dataclasses.replace(state.hot[number], slots=slots))
