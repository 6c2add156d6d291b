"""Commit: accepted positions become history; rejected rows leave no visible trace."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.hierarchy.state import HierarchyState


def commit(state: HierarchyState, accepted: Int[Array, " R"]) -> HierarchyState:
    """Advance the length of every active request by `accepted` and end the step.

    Rows and index keys beyond the new length stay where they are and are never read: selection
    stops at the query's own position, and the next append overwrites them.

    Args:
        state: the hierarchy after the last group of a step.
        accepted: int32 in 1..T for active requests, such that the new length is at most the
            capacity (the caller's duty: a later host row is the next request's); ignored for the
            others.
    """
    length = state.length + jnp.where(state.active, accepted, 0)
    return dataclasses.replace(state, length=length, step=state.step + 1)
