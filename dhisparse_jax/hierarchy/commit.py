"""Commit: accepted positions become history; rejected rows leave no visible trace."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.state import HierarchyState


def commit(
    state: HierarchyState, cfg: HierarchyConfig, accepted: Int[Array, " R"]
) -> HierarchyState:
    """Advance the length of every active request by `accepted` and end the step.

    Rows, index keys and what layers keep beyond the new length stay where they are and are never
    read: selection stops at the query's own position, and the next append overwrites them.

    Args:
        state: the hierarchy after the last group of a step.
        cfg: its sizes.
        accepted: int32 in 0..T for active requests; ignored for the others. Positions beyond the
            capacity do not exist: a full request stays full, and its caller must end it.
    """
    length = jnp.minimum(state.length + jnp.where(state.active, accepted, 0), cfg.capacity)
    return dataclasses.replace(state, length=length, step=state.step + 1)
