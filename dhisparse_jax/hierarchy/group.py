"""One selection group of a decode step: the calls that an attention module makes.

`open_group` once per group, with what its indexer computed; `attend` once per layer of the group;
`close_group` at the end. Where several layers of a group select from the same records, each for
those that follow it, `select_again` begins with the next of them.
"""

import dataclasses

import jax
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.append import append_keys, append_row
from dhisparse_jax.hierarchy.heads import (
    attend_parts,
    attend_slots,
    check_query,
    joined,
    split_query,
)
from dhisparse_jax.hierarchy.layout import Layer
from dhisparse_jax.hierarchy.plan import plan
from dhisparse_jax.hierarchy.retrieve import Attended, retrieve, retrieve_attend
from dhisparse_jax.hierarchy.select import Blocks, IndexInputs, select
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
        blocks: what the first selection left to the others; see
            `dhisparse_jax.hierarchy.select.Selection`.
        complete: whether the missing records have come.
    """

    state: HierarchyState
    plan: PlanResult
    selection: Int[Array, "R T K"]
    blocks: Blocks
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

    Raises:
        UserError: there are no index keys of the new tokens.
    """
    if index.keys is None:
        raise UserError("the first selection of a group needs the index keys of its new records")
    with jax.named_scope("append"):
        state = append_keys(state, cfg, pool, index.keys)
    return _planned(state, cfg, pool, index, live, None)


def select_again(
    group: OpenGroup,
    cfg: HierarchyConfig,
    pool: int,
    index: IndexInputs,
    live: Int[Array, " R"] | None = None,
) -> OpenGroup:
    """Select again from the records of an open group, for the layers that follow.

    What was selected before may lose its hot slots to what is now: its layers have attended.

    Args:
        group: the open group; a layer of it has attended, and written the new records.
        cfg: sizes of the hierarchy.
        pool: pool of the group.
        index: what another indexer computed, without keys.
        live: as in `open_group`.

    Raises:
        UserError: no layer has attended yet, or there are index keys.
    """
    if index.keys is not None or not group.complete:
        raise UserError("a group is selected from again without keys, when a layer has attended")
    return _planned(group.state, cfg, pool, index, live, group)


def _planned(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    index: IndexInputs,
    live: Int[Array, " R"] | None,
    before: OpenGroup | None,
) -> OpenGroup:
    with jax.named_scope("select"):
        found = select(state, cfg, pool, index, live, before.blocks if before else None)
    return open_selected(state, cfg, pool, found.records, found.blocks, again=before is not None)


def open_selected(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    selection: Int[Array, "R T K"],
    blocks: Blocks = None,
    *,
    again: bool = False,
) -> OpenGroup:
    """Plan where records will be that are selected.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which group.
        selection: int32 records of every query, ascending, each once; then NO_SLOT.
        blocks: what the first selection of the group leaves to the others.
        again: whether the group has been selected from in this step.
    """
    with jax.named_scope("plan"):
        planned, state = plan(state, cfg, pool, selection, again=again)
    if state.selection is not None:
        kept = with_row(state.selection, pool, selection)
        state = dataclasses.replace(state, selection=kept)
    return OpenGroup(state=state, plan=planned, selection=selection, blocks=blocks)


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
    row: Shaped[Array, "R E width"] | None,
    query: Float[Array, "R T H key"],
) -> tuple[Attended, OpenGroup]:
    """Append one layer's new rows and attend over the selected ones.

    The first attention of a group runs together with the retrieval of what is missing.

    Args:
        group: the open group.
        cfg: sizes of the hierarchy.
        pool: pool of the group.
        layer: place of the layer in the group, 0 for the first.
        row: rows of the new tokens in this layer, or of the records that they can complete. None:
            another layer has written them.
        query: queries; absorbed ones where all heads share a row.

    Returns:
        The attended values `softmax(scale * query . row) . row[:value_width]` over the selected
        rows (zeros for inactive requests) with their log-sum-exp, and the group to go on with.

    Raises:
        UserError: the pool has no such layer, or rows or queries are not as the geometry says.
    """
    geometry, state = cfg.geometry, group.state
    check_query(geometry.row, query)
    if row is not None:
        with jax.named_scope("append"):
            state = append_row(state, cfg, pool, layer, row)
    number, _ = cfg.hot_pool_of(pool)
    location = group.plan.location
    if group.complete or not isinstance(layer, int):
        state = close_group(dataclasses.replace(group, state=state), cfg, pool)
        with jax.named_scope("attend"):
            slots = state.hot[number].slots
            attended = attend_slots(geometry, pool, layer, query, slots, location)
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
