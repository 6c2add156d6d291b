"""Retrieve: execute a plan. Each missing record crosses the link once, bit exact.

Alone, or together with the first attention that reads what it brings: then the link is busy while
the attention works on what was there.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot_slots
from pallas_kernels.common.ids import masked
from pallas_kernels.plan.types import PlanResult
from pallas_kernels.retrieve.api import retrieve as retrieve_op
from pallas_kernels.retrieve.types import Fetches, Moves
from pallas_kernels.retrieve_attend.api import Attention
from pallas_kernels.retrieve_attend.api import retrieve_attend as retrieve_attend_op


class Attended(NamedTuple):
    """What attention over the selected rows gives.

    Attributes:
        values: the weighted values; zeros where nothing is selected.
        lse: float32 log of the sum of the exponentials, with which attention over other rows can
            be added; -inf where nothing is selected.
    """

    values: Float[Array, "R T H value"]
    lse: Float[Array, "R T H"]


def retrieve(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, plan: PlanResult
) -> HierarchyState:
    """Fetch the missing records from the host, and move the retiring tail records to hot slots."""
    number, _ = cfg.hot_pool_of(pool)
    slots = retrieve_op(
        state.pools[pool].host, state.hot[number].slots, *_lists(state, cfg, pool, plan)
    )
    return with_hot_slots(state, number, slots)


def retrieve_attend(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    layer: int,
    plan: PlanResult,
    selection: Int[Array, "R T K"],
    query: Float[Array, "R T H width"],
) -> tuple[Attended, HierarchyState]:
    """`retrieve`, and what attention of one layer gives afterwards."""
    number, _ = cfg.hot_pool_of(pool)
    fetches, moves = _lists(state, cfg, pool, plan)
    slots = state.hot[number].slots
    first_word = layer * layout.row_stride(cfg.geometry, slots)
    attended, slots = retrieve_attend_op(
        state.pools[pool].host,
        slots,
        fetches,
        Attention(query, plan.location, selection, plan.fetch_position),
        moves,
        **layout.row_options(cfg.geometry, first_word),
    )
    return Attended(*attended), with_hot_slots(state, number, slots)


def _lists(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, plan: PlanResult
) -> tuple[Fetches, Moves]:
    """What comes from the host, and what from the tail, which is no target of a plan."""
    retiring = plan.retire_position
    request = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    request = jnp.broadcast_to(request, retiring.shape)
    tail = layout.tail_slot(cfg, pool, request, jnp.maximum(retiring, 0))
    moves = Moves(masked(tail, retiring >= 0).reshape(-1), plan.retire_slot.reshape(-1))
    rows = layout.host_rows(cfg, pool, state.host_page_of, plan.fetch_position)
    return Fetches(rows, plan.fetch_slot, plan.counts.fetched), moves
