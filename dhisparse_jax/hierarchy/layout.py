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
from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, in_range, masked


def row_options(cfg: HierarchyConfig, layer: int) -> dict[str, Any]:
    """What attention must know of the rows of a layer (`pallas_kernels.sparse_attention.api`)."""
    row = cfg.geometry.row
    return {
        "offset": layer * row.words,
        "row_format": jnp.dtype(row.dtype) if isinstance(row.dtype, str) else row.dtype,
        "value_width": row.value_width,
        "scale": cfg.geometry.scale,
    }


def pages(cfg: HierarchyConfig, hot: int) -> int:
    """Number of pages of hot pool `hot`."""
    return len(cfg.hot_pools[hot]) * cfg.requests * cfg.share_pages


def page_region(cfg: HierarchyConfig, hot: int) -> int:
    """Number of slots that are cut into pages."""
    return pages(cfg, hot) * cfg.page_slots


def tail_region(cfg: HierarchyConfig, hot: int) -> int:
    """Number of slots that are tails."""
    return len(cfg.hot_pools[hot]) * cfg.requests * cfg.tail


def slots(cfg: HierarchyConfig, hot: int) -> int:
    """Number of slots of hot pool `hot`, all regions."""
    return page_region(cfg, hot) + tail_region(cfg, hot) + cfg.requests * cfg.staging


def tail_start(cfg: HierarchyConfig, length: Int[Array, " R"]) -> Int[Array, " R"]:
    """First position that the tail holds while T rows beyond `length` are being written.

    A ring of 8 with T = 2 at length 20 holds positions 14..21: 20 and 21 overwrite 12 and 13.
    """
    return jnp.maximum(length + cfg.queries - cfg.tail, 0)


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
    count = cfg.requests * cfg.staging
    every = first + jnp.arange(count, dtype=jnp.int32)
    return every.reshape(cfg.requests, cfg.staging)


def host_rows(
    cfg: HierarchyConfig, pages: Int[Array, "R N"], position: Int[Array, "R n"]
) -> Int[Array, "R n"]:
    """Host row of positions of each request, the same in every pool.

    A request with pages 7 and 2 of 16 positions has position 20 in row 2 * 16 + 4. A position
    without a page gets a row that no pool has, which is read as POISON and written nowhere.

    Args:
        cfg: sizes of the hierarchy.
        pages: int32 host pages of each request, NO_SLOT after the last.
        position: int32 positions; NO_SLOT stays NO_SLOT.
    """
    held = in_range(position, pages.shape[1] * cfg.host_page)
    page = jnp.take_along_axis(pages, jnp.where(held, position // cfg.host_page, 0), axis=1)
    row = page * cfg.host_page + position % cfg.host_page
    return masked(jnp.where(held & (page >= 0), row, INT32_MAX), position != NO_SLOT)
