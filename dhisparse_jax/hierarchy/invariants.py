"""What must hold between steps, checked on the host with NumPy. For tests and for debugging."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.keys import packed_keys
from dhisparse_jax.hierarchy.state import HierarchyState

Host = Any
"""A state whose leaves are NumPy arrays."""


def check_invariants(state: HierarchyState, cfg: HierarchyConfig) -> dict[str, bool]:
    """Named invariants of a state between steps; all must be true.

    pages_partitioned: every page is free or held by exactly one request and pool, and both tables
        say so.
    budget_is_held: `budget` counts the held pages, which come first in the page list.
    floor_kept: no active request holds less than its floor; inactive ones hold nothing.
    maps_agree: `slot_of` and the slots' positions are inverse to each other, slot by slot, and
        `hot_records` counts them.
    slots_owned: only slots of held pages hold a position.
    hot_is_committed: no hot slot holds a position at or beyond the length.
    hot_equals_host: every hot record equals its host record, byte for byte.
    tail_equals_host: every committed record in a tail equals its host record.
    keys_equal_host: every committed index key equals its copy in host memory.
    host_pages_held: every committed position has a host page, no row has one twice, and inactive
        rows have none.
    shared_is_complete: a host page that several rows have lies below the lengths of all of them, so
        that nobody writes to it.
    lengths_fit: lengths lie in 0..capacity, and are 0 for inactive rows.
    marks_past: no slot was used in a step that has not been.
    ghosts_gone: ghosts are distinct committed positions without a slot, NO_SLOT after the last;
        inactive rows have none.
    """
    host: Host = jax.device_get(state)
    checks = [
        _pages_partitioned,
        _budget_is_held,
        _floor_kept,
        _maps_agree,
        _slots_owned,
        _hot_is_committed,
        _hot_equals_host,
        _tail_equals_host,
        _keys_equal_host,
        _host_pages_held,
        _shared_is_complete,
        _lengths_fit,
        _marks_past,
        _ghosts_gone,
    ]
    return {check.__name__.removeprefix("_"): check(host, cfg) for check in checks}


def _holders(host: Host, cfg: HierarchyConfig, pool: int) -> np.ndarray:
    """Slots of the pool in use, as rows (request, position, slot)."""
    request, position = np.nonzero(host.pools[pool].slot_of >= 0)
    return np.stack([request, position, host.pools[pool].slot_of[request, position]])


def _complete(host: Host, cfg: HierarchyConfig, pool: int) -> np.ndarray:
    """How many records of each request are complete in one pool."""
    return host.length // cfg.geometry.rate(pool)


def _as_on_the_host(
    host: Host,
    cfg: HierarchyConfig,
    pool: int,
    request: np.ndarray | int,
    position: np.ndarray,
    slot: np.ndarray,
) -> bool:
    """Whether slots equal the host records of positions, where those have any."""
    row, records = host_rows(host, cfg, pool)[request, position], host.pools[pool].host
    found = row < len(records)  # else `host_pages_held` is false
    slots = host.hot[cfg.hot_pool_of(pool)[0]].slots
    return np.array_equal(slots[slot[found]], records[row[found]])


def host_rows(host: Host, cfg: HierarchyConfig, pool: int) -> np.ndarray:
    """Host row of every record of every request in one pool."""
    count = cfg.records(pool)
    every = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (cfg.requests, count))
    return np.asarray(layout.host_rows(cfg, pool, jnp.asarray(host.host_page_of), every))


def _pages_partitioned(host: Host, cfg: HierarchyConfig) -> bool:
    for number, members in enumerate(cfg.hot_pools):
        owner = np.full_like(host.hot[number].owner, -1)
        for pool in members:
            request, column = np.nonzero(host.pools[pool].pages >= 0)
            page = host.pools[pool].pages[request, column]
            if len(np.unique(page)) < len(page) or (owner[page] >= 0).any():
                return False
            owner[page] = pool * cfg.requests + request
        if not np.array_equal(owner, host.hot[number].owner):
            return False
    return True


def _budget_is_held(host: Host, cfg: HierarchyConfig) -> bool:
    column = lambda pool: np.arange(cfg.max_pages(pool))
    return all(
        np.array_equal(host.pools[pool].pages >= 0, column(pool) < host.budget[pool][:, None])
        for pool in range(cfg.pools)
    )


def _floor_kept(host: Host, cfg: HierarchyConfig) -> bool:
    floors = np.array([cfg.floor_pages(pool) for pool in range(cfg.pools)])
    kept = host.budget >= np.where(host.active, floors[:, None], 0)
    return bool(kept.all() and (host.budget[:, ~host.active] == 0).all())


def _maps_agree(host: Host, cfg: HierarchyConfig) -> bool:
    for number, members in enumerate(cfg.hot_pools):
        seen = np.full_like(host.hot[number].position, -1)
        for pool in members:
            request, position, slot = _holders(host, cfg, pool)
            counted = np.bincount(request, minlength=cfg.requests)
            if not np.array_equal(host.hot_records[pool], counted):
                return False
            if len(np.unique(slot)) < len(slot) or (seen[slot] >= 0).any():
                return False
            seen[slot] = position
        if not np.array_equal(seen, host.hot[number].position):
            return False
    return True


def _slots_owned(host: Host, cfg: HierarchyConfig) -> bool:
    for pool in range(cfg.pools):
        request, _, slot = _holders(host, cfg, pool)
        owner = host.hot[cfg.hot_pool_of(pool)[0]].owner[slot // cfg.page_slots]
        if not np.array_equal(owner, pool * cfg.requests + request):
            return False
    return True


def _hot_is_committed(host: Host, cfg: HierarchyConfig) -> bool:
    for pool in range(cfg.pools):
        request, position, _ = _holders(host, cfg, pool)
        if (position >= _complete(host, cfg, pool)[request]).any():
            return False
    return True


def _hot_equals_host(host: Host, cfg: HierarchyConfig) -> bool:
    return all(
        _as_on_the_host(host, cfg, pool, *_holders(host, cfg, pool)) for pool in range(cfg.pools)
    )


def _tail_equals_host(host: Host, cfg: HierarchyConfig) -> bool:
    for request in np.flatnonzero(host.active).tolist():
        for pool in range(cfg.pools):
            count = int(_complete(host, cfg, pool)[request])
            # Between steps the rows beyond the length are not written yet, or were rejected.
            position = np.arange(max(0, count - cfg.tail + cfg.fresh(pool)), count)
            slot = np.asarray(
                layout.tail_slot(cfg, pool, jnp.full_like(position, request), jnp.asarray(position))
            )
            if not _as_on_the_host(host, cfg, pool, request, position, slot):
                return False
    return True


def _keys_equal_host(host: Host, cfg: HierarchyConfig) -> bool:
    return all(_pool_keys_equal_host(host, cfg, pool) for pool in range(cfg.pools))


def _pool_keys_equal_host(host: Host, cfg: HierarchyConfig, pool: int) -> bool:
    mine, rows = host.pools[pool], host_rows(host, cfg, pool)
    if mine.host_keys is None:
        return True
    committed = np.arange(cfg.records(pool)) < _complete(host, cfg, pool)[:, None]
    committed &= rows < cfg.host_rows(pool)  # else `host_pages_held` is false
    packed = _packed(mine.index_keys, cfg)
    return np.array_equal(mine.host_keys[rows[committed]], packed[committed])


def _packed(keys: Host, cfg: HierarchyConfig) -> np.ndarray:
    """Index keys as `host_keys` has them, [R, E, ..]: all, so that one program packs them."""
    every = jax.tree.leaves(keys)[0].shape[:2]
    rows = every[0] * every[1]  # said, since keys may have no numbers
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf.reshape(rows, *leaf.shape[2:])), keys)
    packed = np.asarray(packed_keys(flat, cfg.record_layout))
    return packed.reshape(*every, *packed.shape[1:])


def _host_pages_held(host: Host, cfg: HierarchyConfig) -> bool:
    needed = -(-host.length // cfg.host_page)
    for pages, count, active in zip(host.host_page_of, needed, host.active, strict=True):
        mine = pages[pages >= 0]
        distinct = len(np.unique(mine)) == len(mine)
        enough = (pages[:count] >= 0).all() if active else len(mine) == 0
        if not (distinct and enough and (mine < cfg.host_page_count).all()):
            return False
    return True


def _shared_is_complete(host: Host, cfg: HierarchyConfig) -> bool:
    row, column = np.nonzero(host.host_page_of >= 0)
    page = host.host_page_of[row, column]
    users = np.bincount(np.unique(np.stack([page, row]), axis=1)[0])
    complete = (column + 1) * cfg.host_page <= host.length[row]
    return bool((complete | (users[page] == 1)).all())


def _lengths_fit(host: Host, cfg: HierarchyConfig) -> bool:
    fits = (host.length >= 0) & (host.length <= cfg.capacity)
    return bool(fits.all() and (host.length[~host.active] == 0).all())


def _marks_past(host: Host, cfg: HierarchyConfig) -> bool:
    return all((hot.mark < host.step).all() for hot in host.hot)


def _ghosts_gone(host: Host, cfg: HierarchyConfig) -> bool:
    if host.benefit.ghost is None:
        return True
    for pool, request in np.ndindex(cfg.pools, cfg.requests):
        ghosts = host.benefit.ghost[pool, request]
        known = ghosts[: (ghosts >= 0).sum()]
        if (known < 0).any() or len(np.unique(known)) < len(known):
            return False
        if (known >= _complete(host, cfg, pool)[request]).any():
            return False
        if (host.pools[pool].slot_of[request, known] >= 0).any():
            return False
    return True
