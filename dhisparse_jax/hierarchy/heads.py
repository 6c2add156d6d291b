"""Attention over slots, for all heads of a layer.

The operation knows rows that all heads share. A row with keys and values of several heads is one
such row for each of them, `value | key`, and the queries of its heads are zero where the value is:
so the logits are those of the keys alone, and every implementation of the operation serves.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import OPAQUE, Geometry, RowFormat
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.layout import Layer
from dhisparse_jax.hierarchy.retrieve import Attended
from pallas_kernels.sparse_attention.api import sparse_attention


def check_query(row: RowFormat, query: Float[Array, "R T H key"]) -> None:
    """Refuse queries that rows have no keys for.

    Raises:
        UserError: they have another width than keys, or their heads are no multiple of those of
            the rows, or rows are bytes.
    """
    heads, width = query.shape[2:]
    if row.dtype == OPAQUE:
        raise UserError("rows are bytes, which the library cannot attend to; read them instead")
    if width != row.query_width:
        raise UserError(f"a query has {width} numbers; rows have keys of {row.query_width}")
    if heads % row.parts:
        raise UserError(f"{heads} query heads cannot be split among {row.parts} heads of the rows")


def split_query(
    row: RowFormat, query: Float[Array, "R T H key"]
) -> list[Float[Array, "R T per part"]]:
    """The queries of each part of a row, as wide as it; query head h belongs to part h // per."""
    if row.kv_heads is None:
        return [query]
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (row.value_width, 0)))
    return jnp.split(padded, row.kv_heads, axis=2)


def joined(first: Attended, others: list[Attended]) -> Attended:
    """What all heads attend to, part by part."""
    if not others:
        return first
    every = zip(first, *others, strict=True)
    return Attended(*(jnp.concatenate(leaves, axis=2) for leaves in every))


def attend_slots(
    geometry: Geometry,
    pool: int,
    layer: Layer,
    query: Float[Array, "R T H key"],
    slots: Int[Array, "S *W"],
    location: Int[Array, "R T K"],
) -> Attended:
    """Attention of one layer over slots of a pool's records that are all in place.

    A kernel knows at compile time where a row begins: of a layer that is an array, the branches for
    all layers of the pool are compiled.
    """
    if isinstance(layer, int):
        queries = split_query(geometry.row, query)
        first, *others = attend_parts(geometry, layer, 0, queries, slots, location)
        return joined(first, others)
    layers = geometry.layers_per_pool[pool]
    branches = [partial(attend_slots, geometry, pool, place) for place in range(layers)]
    return lax.switch(layer, branches, query, slots, location)


def attend_parts(
    geometry: Geometry,
    layer: int,
    first: int,
    queries: list[Float[Array, "R T per part"]],
    slots: Int[Array, "S *W"],
    location: Int[Array, "R T K"],
) -> list[Attended]:
    """Attention over some parts of the rows of one layer.

    Args:
        geometry: of the model.
        layer: place of the layer in its group.
        first: the part that the first queries are for; the others follow it.
        queries: from `split_query`.
        slots: records.
        location: int32 slot of each selected record.
    """
    first_word = layer * layout.row_stride(geometry, slots)
    words = geometry.row.words // geometry.row.parts
    found = []
    for part, query in enumerate(queries, first):
        options = layout.row_options(geometry, first_word + part * words)
        found.append(Attended(*sparse_attention(query, slots, location, **options)))
    return found
