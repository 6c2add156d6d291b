"""One selection group of a decode step: the two calls that an attention module makes.

`open_group` once per group, with what its indexer computed; `attend` once per layer of the group.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.append import append_keys, append_row
from dhisparse_jax.hierarchy.plan import plan
from dhisparse_jax.hierarchy.retrieve import retrieve
from dhisparse_jax.hierarchy.select import IndexInputs, select
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.plan.types import PlanResult
from pallas_kernels.sparse_attention.api import sparse_attention


@pytree
class OpenGroup:
    """A group whose selected records are on the device. Thread it through the group's layers."""

    state: HierarchyState
    plan: PlanResult


def open_group(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, index: IndexInputs
) -> OpenGroup:
    """Select for the T new tokens of every request, and bring what they selected to the device.

    A query sees every position up to its own, itself included; the score of a position is
    `sum_h weights_h * relu(query_h . key)`. Run it under `jit`, with the state donated.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which group, counted from 0.
        index: what the group's indexer computed for the new tokens.
    """
    with jax.named_scope("append"):
        state = append_keys(state, cfg, pool, index.keys)
    with jax.named_scope("select"):
        selection = select(state, cfg, pool, index)
    with jax.named_scope("plan"):
        planned, state = plan(state, cfg, pool, selection)
    with jax.named_scope("retrieve"):
        state = retrieve(state, cfg, pool, planned)
    return OpenGroup(state=state, plan=planned)


def attend(
    group: OpenGroup,
    cfg: HierarchyConfig,
    pool: int,
    layer: int,
    row: Float[Array, "R T width"],
    query: Float[Array, "R T H width"],
) -> tuple[Float[Array, "R T H value"], OpenGroup]:
    """Append one layer's new rows and attend over the selected ones.

    Args:
        group: the open group.
        cfg: sizes of the hierarchy.
        pool: pool of the group.
        layer: place of the layer in the group, 0 for the first.
        row: rows of the new tokens in this layer.
        query: absorbed queries.

    Returns:
        The attended values `softmax(scale * query . row) . row[:value_width]` over the selected
        rows (zeros for inactive requests), and the group to go on with.

    Raises:
        UserError: the pool has no such layer, or rows or queries have another width than they must.
    """
    if query.shape[-1] != cfg.geometry.row.width:
        width = cfg.geometry.row.width
        raise UserError(f"a query has {query.shape[-1]} numbers; rows have {width}")
    with jax.named_scope("append"):
        state = append_row(group.state, cfg, pool, layer, row)
    number, _ = cfg.hot_pool_of(pool)
    row_format = cfg.geometry.row
    with jax.named_scope("attend"):
        values, _ = sparse_attention(
            query,
            state.hot[number].slots,
            group.plan.location,
            offset=layer * row_format.words,
            row_format=jnp.dtype(row_format.dtype),
            value_width=row_format.value_width,
            scale=cfg.geometry.scale,
        )
    return values, OpenGroup(state=state, plan=group.plan)
