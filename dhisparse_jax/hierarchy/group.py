"""One selection group of a decode step: the calls that an attention module makes.

`open_group` once per group, with what its indexer computed; `attend` once per layer of the group;
`close_group` at the end.
"""

import dataclasses

import jax
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.append import append_keys, append_row
from dhisparse_jax.hierarchy.heads import (
    Layer,
    attend_parts,
    attend_slots,
    check_query,
    joined,
    split_query,
)
from dhisparse_jax.hierarchy.plan import plan
from dhisparse_jax.hierarchy.retrieve import Attended, retrieve, retrieve_attend
from dhisparse_jax.hierarchy.select import IndexInputs, select
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_row
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.plan.types import PlanResult


@pytree
class OpenGroup:
    """A group whose selected records have their slots. Thread it through the group's layers.

    Attributes:
        state: the hierarchy; what is missing comes with the first attention.
        plan: where each selected record is, and what is missing.
        selection: int32 selected positions.
        complete: whether the missing records have come.
    """

    state: HierarchyState
    plan: PlanResult
    selection: Int[Array, "R T K"]
    complete: bool = dataclasses.field(default=False, metadata={"static": True})


def open_group(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    index: IndexInputs,
    live: Int[Array, " R"] | None = None,
) -> OpenGroup:
    """Select for the T new tokens of every request, and plan where what they select will be.

    A query sees every position up to its own, itself included; the score of a position is
    `sum_h weights_h * relu(query_h . key)`. Run it under `jit`, with the state donated.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which group, counted from 0.
        index: what the group's indexer computed for the new tokens.
        live: int32 how many of the T queries count, 0..T; None: all. The others select nothing, so
            nothing is fetched for them, and their results mean nothing.
    """
    with jax.named_scope("append"):
        state = append_keys(state, cfg, pool, index.keys)
    with jax.named_scope("select"):
        selection = select(state, cfg, pool, index, live)
    return open_selected(state, cfg, pool, selection)


def open_selected(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, selection: Int[Array, "R T K"]
) -> OpenGroup:
    """Plan where records will be that were selected elsewhere.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which group.
        selection: int32 records of every query, ascending, each once; then NO_SLOT.
    """
    with jax.named_scope("plan"):
        planned, state = plan(state, cfg, pool, selection)
    if state.selection is not None:
        kept = with_row(state.selection, pool, selection)
        state = dataclasses.replace(state, selection=kept)
    return OpenGroup(state=state, plan=planned, selection=selection)


def close_group(group: OpenGroup, cfg: HierarchyConfig, pool: int) -> HierarchyState:
    """The hierarchy after a group's layers; brings what is missing if no layer has attended."""
    if group.complete:
        return group.state
    with jax.named_scope("retrieve"):
        return retrieve(group.state, cfg, pool, group.plan)


def attend(
    group: OpenGroup,
    cfg: HierarchyConfig,
    pool: int,
    layer: Layer,
    row: Shaped[Array, "R E width"],
    query: Float[Array, "R T H key"],
) -> tuple[Attended, OpenGroup]:
    """Append one layer's new rows and attend over the selected ones.

    The first attention of a group runs together with the retrieval of what is missing.

    Args:
        group: the open group.
        cfg: sizes of the hierarchy.
        pool: pool of the group.
        layer: place of the layer in the group, 0 for the first.
        row: rows of the new tokens in this layer, or of the records that they can complete.
        query: queries; absorbed ones where all heads share a row.

    Returns:
        The attended values `softmax(scale * query . row) . row[:value_width]` over the selected
        rows (zeros for inactive requests) with their log-sum-exp, and the group to go on with.

    Raises:
        UserError: the pool has no such layer, or rows or queries are not as the geometry says.
    """
    geometry = cfg.geometry
    check_query(geometry.row, query)
    with jax.named_scope("append"):
        state = append_row(group.state, cfg, pool, layer, row)
    number, _ = cfg.hot_pool_of(pool)
    location = group.plan.location
    if group.complete or not isinstance(layer, int):
        state = close_group(dataclasses.replace(group, state=state), cfg, pool)
        with jax.named_scope("attend"):
            attended = attend_slots(geometry, layer, query, state.hot[number].slots, location)
    else:
        first, *others = split_query(geometry.row, query)  # of most rows, one
        with jax.named_scope("retrieve_attend"):
            attended, state = retrieve_attend(
                state, cfg, pool, layer, group.plan, group.selection, first
            )
        with jax.named_scope("attend"):
            slots = state.hot[number].slots
            attended = joined(attended, attend_parts(geometry, layer, 1, others, slots, location))
    return attended, dataclasses.replace(group, state=state, complete=True)
