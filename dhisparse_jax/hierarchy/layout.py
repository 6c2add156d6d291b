"""Where things are: the slot space of a hot pool, and the rows of the host pools.

A hot pool is pages, then tails, then staging, under one index.

One address space means that attention reads one array with one list of indices, wherever a record
lies. With 2 pools, 3 requests, 4 pages of 16 slots, a tail of 8 and 5 staging slots per request:

    0..63 pages | 64..111 tails (pool 0: request 0 64..71, request 1 72..79, ..) | 112..126 staging

A host pool is pages of `host_page` positions, the same ones in every pool: one table says which
pages a request has, and requests that start with the same tokens may have some in common.

All functions are arithmetic on int32 indices; the layout follows from the configuration alone.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry, RowFormat
from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, in_range, masked
from pallas_kernels.common.record_layout import layout_of

Layer = int | Int[Array, ""]
"""Place of a layer in its group; an array where layers are scanned over."""


def row_stride(geometry: Geometry, slots: Int[Array, "S *W"]) -> int:
    """Words from the row of one layer to that of the next, in records of whatever layout."""
    return layout_of(slots).row_stride(geometry.row.words)


def row_options(geometry: Geometry, offset: int, row: RowFormat | None = None) -> dict[str, Any]:
    """What attention must know of the rows of a layer (`pallas_kernels.sparse_attention.api`).

    Args:
        geometry: of the model.
        offset: word of a record where they start.
        row: their format, if it is not that of the geometry.
    """
    row = row or geometry.row
    return {
        "offset": offset,
        "row_format": jnp.dtype(row.dtype) if isinstance(row.dtype, str) else row.dtype,
        "value_width": row.value_width,
        "scale": geometry.scale,
    }


def pages(cfg: HierarchyConfig, hot: int) -> int:
    """Number of pages of hot pool `hot`."""
    return sum(cfg.requests * cfg.share_pages(pool) for pool in cfg.hot_pools[hot])


def page_region(cfg: HierarchyConfig, hot: int) -> int:
    """Number of slots that are cut into pages."""
    return pages(cfg, hot) * cfg.page_slots


def tail_region(cfg: HierarchyConfig, hot: int) -> int:
    """Number of slots that are tails."""
    return len(cfg.hot_pools[hot]) * cfg.requests * cfg.tail


def slots(cfg: HierarchyConfig, hot: int) -> int:
    """Number of slots of hot pool `hot`, all regions."""
    return page_region(cfg, hot) + tail_region(cfg, hot) + cfg.requests * cfg.staging(hot)


def complete(cfg: HierarchyConfig, pool: int, length: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Records of a pool that so many positions complete: `length` itself without compression."""
    return length // cfg.geometry.rate(pool)


def tail_start(cfg: HierarchyConfig, pool: int, length: Int[Array, " R"]) -> Int[Array, " R"]:
    """First record that the tail holds while those of T positions beyond `length` are written.

    A ring of 8 with T = 2 at length 20 holds positions 14..21: 20 and 21 overwrite 12 and 13.
    """
    return jnp.maximum(complete(cfg, pool, length) + cfg.fresh(pool) - cfg.tail, 0)


def tail_slot(
    cfg: HierarchyConfig, pool: int, request: Int[Array, "*n"], position: Int[Array, "*n"]
) -> Int[Array, "*n"]:
    """Slot of `position` in the tail ring of `request`; valid from `tail_start` on."""
    hot, member = cfg.hot_pool_of(pool)
    ring = (member * cfg.requests + request) * cfg.tail
    return page_region(cfg, hot) + ring + position % cfg.tail


def staging_slots(cfg: HierarchyConfig, pool: int) -> Int[Array, "R G"]:
    """Staging slots of each request; every pool of the same hot pool uses the same ones in turn."""
    hot, _ = cfg.hot_pool_of(pool)
    first = page_region(cfg, hot) + tail_region(cfg, hot)
    size = cfg.staging(hot)
    count = cfg.requests * size
    every = first + jnp.arange(count, dtype=jnp.int32)
    return every.reshape(cfg.requests, size)


def host_rows(
    cfg: HierarchyConfig, pool: int, pages: Int[Array, "R N"], position: Int[Array, "R n"]
) -> Int[Array, "R n"]:
    """Host row of records of each request, the same in every pool with the same rate.

    A request with pages 7 and 2 of 16 records has record 20 in row 2 * 16 + 4. A position
    without a page gets a row that no pool has, which is read as POISON and written nowhere.

    Args:
        cfg: sizes of the hierarchy.
        pool: which pool.
        pages: int32 host pages of each request, NO_SLOT after the last.
        position: int32 positions; NO_SLOT stays NO_SLOT.
    """
    size = cfg.page_records(pool)
    held = in_range(position, pages.shape[1] * size)
    page = jnp.take_along_axis(pages, jnp.where(held, position // size, 0), axis=1)
    row = page * size + position % size
    return masked(jnp.where(held & (page >= 0), row, INT32_MAX), position != NO_SLOT)
