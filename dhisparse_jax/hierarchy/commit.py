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
        accepted: int32 in 0..T for active requests; ignored for the others. Positions beyond the
            capacity do not exist: a full request stays full, and its caller must end it.
    """
    capacity = state.pools[0].slot_of.shape[1]
    length = jnp.minimum(state.length + jnp.where(state.active, accepted, 0), capacity)
    return dataclasses.replace(state, length=length, step=state.step + 1)
