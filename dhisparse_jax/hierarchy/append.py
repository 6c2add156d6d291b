"""Append: new index keys and new rows of this step's T queries, provisional until `commit`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.formats import stored_keys, stored_rows
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot_slots, with_pool
from pallas_kernels.common.ids import NO_SLOT, dropping
from pallas_kernels.common.rows import write_words


def query_positions(state: HierarchyState, cfg: HierarchyConfig) -> Int[Array, "R T"]:
    """Position of every verify query: `length` up to `length + T - 1`."""
    return state.length[:, None] + jnp.arange(cfg.queries, dtype=jnp.int32)[None]


def new_records(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> Int[Array, "R E"]:
    """Records of a pool that a step can complete: `query_positions` without compression.

    Of those behind the last complete one nothing is read, and what is written there is overwritten.
    """
    first = layout.complete(cfg, pool, state.length)[:, None]
    return first + jnp.arange(cfg.fresh(pool), dtype=jnp.int32)[None]


def append_keys(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, keys: Float[Array, "R E index"]
) -> HierarchyState:
    """Write the index keys of the new records. Rows of inactive requests are not touched."""
    position = jnp.where(state.active[:, None], new_records(state, cfg, pool), NO_SLOT)
    row = jnp.arange(cfg.requests, dtype=jnp.int32)[:, None]
    place = row, dropping(position, cfg.records(pool))
    new = jax.tree.map(
        lambda old, fresh: old.at[place].set(fresh, mode="drop"),
        state.pools[pool].index_keys,
        stored_keys(cfg.geometry, keys),
    )
    return with_pool(state, pool, index_keys=new)


def append_row(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    layer: layout.Layer,
    row: Shaped[Array, "R E width"],
) -> HierarchyState:
    """Write the rows of one layer into the new records, in the tail.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which pool.
        layer: place of the layer among the layers of the pool: its place in a record. An array
            where layers are scanned over, which is not checked.
        row: the new rows, which the row format stores.

    Raises:
        UserError: the pool has no such layer, or rows have another width than the geometry says.
    """
    layers, width = cfg.geometry.layers_per_pool[pool], cfg.geometry.row.width
    if isinstance(layer, int) and not 0 <= layer < layers:
        raise UserError(f"pool {pool} has {layers} layers; there is no layer {layer} in it")
    if row.shape[-1] != width:
        raise UserError(f"a row has {row.shape[-1]} numbers; the geometry says {width}")
    number, _ = cfg.hot_pool_of(pool)
    request = jnp.broadcast_to(
        jnp.arange(cfg.requests, dtype=jnp.int32)[:, None], (cfg.requests, cfg.fresh(pool))
    )
    slot = layout.tail_slot(cfg, pool, request, new_records(state, cfg, pool))
    slot = jnp.where(state.active[:, None], slot, NO_SLOT)
    old = state.hot[number].slots
    first_word = layer * layout.row_stride(cfg.geometry, old)
    place = dropping(slot, old.shape[0])
    new = write_words(old, place, first_word, stored_rows(cfg.geometry.row, row))
    return with_hot_slots(state, number, new)
