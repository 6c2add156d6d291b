"""What layers keep of a request on the device beside records: the newest rows, and rows of all.

A window of the newest positions, what the compression of an unfinished stretch still needs, and
entries that are few enough to be attended to all: `Geometry.kept` lists them for every pool, and
the state has an array `[requests, rows, width]` of each. The row of position p is p modulo the
number of rows where only the newest are kept (a ring), and p // rate where all are.

Nothing has to be rolled back: what rejected positions wrote lies behind the length, where nothing
is read before it is written again, and a ring has room for it beside what is read.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry, Kept
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_pool
from pallas_kernels.common.ids import NO_SLOT, dropping, masked
from pallas_kernels.sparse_attention.api import sparse_attention

Leaf = Shaped[Array, "R n W"]
"""What requests keep of one kind: n rows of W numbers each."""


def keep(
    leaf: Leaf,
    kept: Kept,
    index: Int[Array, "R t"],
    rows: Shaped[Array, "R t W"],
    writes: Bool[Array, " R"],
) -> Leaf:
    """Write rows.

    Args:
        leaf: the rows of every request.
        kept: what they are.
        index: int32 position of each new row, or its number where rows of all are kept. There,
            numbers beyond the capacity are dropped.
        rows: the new rows.
        writes: requests that are written to; the others stay as they are.
    """
    count = leaf.shape[1]
    place = _place(kept, index, count)
    place = dropping(jnp.where(writes[:, None], place, NO_SLOT), count)
    request = jnp.arange(leaf.shape[0], dtype=jnp.int32)[:, None]
    return leaf.at[request, place].set(rows.astype(leaf.dtype), mode="drop")


def kept_rows(leaf: Leaf, kept: Kept, index: Int[Array, "R *t"]) -> Shaped[Array, "R *t W"]:
    """Rows by position or number; undefined where there is none."""
    place = jnp.maximum(_place(kept, index, leaf.shape[1]), 0)
    flat = place.reshape(place.shape[0], -1)
    rows = jnp.take_along_axis(leaf, flat[..., None], axis=1)
    return rows.reshape(*index.shape, leaf.shape[2])


def attend_kept(
    leaf: Int[Array, "R n W"],
    kept: Kept,
    geometry: Geometry,
    index: Int[Array, "R T K"],
    query: Float[Array, "R T H width"],
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """Attention over kept rows.

    Args:
        leaf: rows of every request, as words.
        kept: what they are.
        geometry: whose row format they have, unless they have one of their own.
        index: int32 position or number of each row; NO_SLOT masks.
        query: absorbed queries.
        sinks: logit of each head's sink, if it has one.

    Returns:
        Values and float32 log-sum-exp, as `pallas_kernels.sparse_attention.api`.
    """
    requests, count, words = leaf.shape
    first = count * jnp.arange(requests, dtype=jnp.int32)[:, None, None]
    place = _place(kept, index, count)
    location = masked(first + place, place >= 0)
    return sparse_attention(
        query,
        leaf.reshape(requests * count, words),
        location,
        sinks,
        **layout.row_options(geometry, 0, kept.row),
    )


def _place(kept: Kept, index: Int[Array, "*n"], count: int) -> Int[Array, "*n"]:
    """Number of the row of a request; NO_SLOT where there cannot be one."""
    if kept.span is not None:
        return masked(index % count, index >= 0)
    return masked(index, (index >= 0) & (index < count))


def admit_kept(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    request: Int[Array, ""],
    prompt: tuple[Shaped[Array, "1 _ _"], ...],
) -> HierarchyState:
    """What was kept of a prompt in prefill goes to its row; `join` has set the length.

    Rings differ in size: prefill writes more positions at a time.
    """
    length = state.length[request]
    leaves = []
    for kept, leaf, fresh in zip(
        cfg.geometry.kept_of(pool), state.pools[pool].kept, prompt, strict=True
    ):
        if kept.span is None:
            rows = fresh[0, : leaf.shape[1]]
        else:
            place = jnp.arange(leaf.shape[1], dtype=jnp.int32)
            # The newest position in each place of the ring; before the text, any row will do.
            position = length - 1 - (length - 1 - place) % leaf.shape[1]
            rows = kept_rows(fresh, kept, position[None])[0]
        leaves.append(lax.dynamic_update_index_in_dim(leaf, rows, request, axis=0))
    return with_pool(state, pool, kept=tuple(leaves))
