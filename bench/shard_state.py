"""The hierarchy as long decoding leaves it, without any of it: host pools, tables, hot slots, keys.

Every row holds a request of the same length, and every pool of it the same number of pages, since
all have a record for each position. They hold what an admission puts there (`hierarchy.admit`): the
newest records before the tail, which is what an LRU cache would hold, since traces name positions
in the order of their last selection.

Host pools repeat a pattern of random records and keys, so what is on the device can be made there,
equal to the bytes in host memory, and no time depends on it. Requests that find no host pages of
their own share those of others: what they read is as far apart, and nothing depends on its values.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int

from bench.shard_weights import random_like
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy.formats import StoredKeys, stored_keys, stored_rows
from dhisparse_jax.hierarchy.keys import packed_keys
from dhisparse_jax.hierarchy.state import (
    FILL,
    HOST_LEAVES,
    HierarchyState,
    abstract,
    host_sharding,
)
from pallas_kernels.common.ids import NO_SLOT

PATTERN = 1024
"""Random records that a pool repeats."""

KEY_PATTERN = 2**17 - 1
"""Random index keys that a pool repeats: more than a history has, since no real one has so many
ties that the selection would be most of the work."""


class Pattern(NamedTuple):
    """What a pool repeats: records, and index keys as stored."""

    records: Int[Array, "P W"]
    keys: StoredKeys


class HostPool(NamedTuple):
    """The host arrays of a pool."""

    host: Int[Array, "H W"]
    host_keys: Int[Array, "H Wk"]


def patterns(cfg: HierarchyConfig) -> list[Pattern]:
    """The pattern of every pool; the same for all cells of a model."""
    words = cfg.record_words
    return [
        _pattern(cfg.geometry, layers, words(pool), pool)
        for pool, layers in enumerate(cfg.geometry.layers_per_pool)
    ]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _pattern(geometry: Geometry, layers: int, words: int, seed: Int[Array, ""]) -> Pattern:
    shapes = [(PATTERN, layers, geometry.row.width), (KEY_PATTERN, geometry.index_width)]
    wanted = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    values, keys = random_like(wanted, seed)
    records = stored_rows(geometry.row, values).reshape(PATTERN, -1)
    return Pattern(
        records=jnp.pad(records, ((0, 0), (0, words - records.shape[1]))),
        keys=stored_keys(geometry, keys),
    )


@partial(jax.jit, static_argnums=1)
def _repeated(pattern: Int[Array, "P W"], rows: int) -> Int[Array, "rows W"]:
    return pattern[jnp.arange(rows, dtype=jnp.int32) % pattern.shape[0]]


def host_pools(cfg: HierarchyConfig, made: list[Pattern]) -> list[HostPool]:
    """Host pools, made on the device and written out, one array at a time."""

    def placed(pattern: Int[Array, "P W"]) -> Array:
        array = jax.device_put(_repeated(pattern, cfg.host_rows(0)), host_sharding())
        return array.block_until_ready()

    packed = jax.jit(packed_keys, static_argnums=1)
    return [
        HostPool(placed(pattern.records), placed(packed(pattern.keys, cfg.record_layout)))
        for pattern in made
    ]


def hosts_of(state: HierarchyState) -> list[HostPool]:
    """The host arrays of a state whose other leaves are not needed any more."""
    pools: list[HostPool] = []
    for pool in state.pools:
        assert pool.host_keys is not None, "the model has an index"
        pools.append(HostPool(pool.host, pool.host_keys))
    return pools


class Tables(NamedTuple):
    """What says where records are, for all pools of a hot pool; see `hierarchy.state`."""

    slot_of: Int[np.ndarray, "members R C"]
    pages: Int[np.ndarray, "members R Pmax"]
    owner: Int[np.ndarray, " P"]
    position: Int[np.ndarray, " page_slots"]
    mark: Int[np.ndarray, " page_slots"]
    content: Int[np.ndarray, " S"]


def tables(cfg: HierarchyConfig, hot: int, history: int) -> Tables:
    """Every pool and request holds `share_pages` pages in a row, full of the newest records.

    `content` says which record of the stacked patterns each slot holds.
    """
    members, rows, size = len(cfg.hot_pools[hot]), cfg.requests, cfg.hot_slots(0)
    end = max(history + cfg.fresh(0) - cfg.tail, 0)
    count = min(end, size)
    place = np.arange(size, dtype=np.int32)
    held = np.where(place < count, end - count + place, NO_SLOT).astype(np.int32)
    first = np.arange(members * rows, dtype=np.int32).reshape(members, rows) * size
    slot_of = np.full((members, rows, cfg.records(0)), NO_SLOT, np.int32)
    slot_of[..., end - count : end] = first[..., None] + place[:count]
    pages = np.full((members, rows, cfg.max_pages(0)), NO_SLOT, np.int32)
    shared = min(cfg.share_pages(0), cfg.max_pages(0))
    number = np.arange(shared, dtype=np.int32)
    pages[..., :shared] = first[..., None] // cfg.page_slots + number
    holder = np.asarray(cfg.hot_pools[hot])[:, None] * rows + np.arange(rows)[None]
    return Tables(
        slot_of=slot_of,
        pages=pages,
        owner=np.repeat(holder.reshape(-1), cfg.share_pages(0)).astype(np.int32),
        position=np.tile(held, members * rows),
        mark=np.tile(np.where(held >= 0, 1 - (end - held), 0), members * rows).astype(np.int32),
        content=_content(cfg, hot, held, history),
    )


def _content(
    cfg: HierarchyConfig, hot: int, held: Int[np.ndarray, " n"], history: int
) -> Int[np.ndarray, " S"]:
    """Record of the stacked patterns in every slot: pages, tails, staging."""
    members, rows = len(cfg.hot_pools[hot]), cfg.requests
    base = np.arange(rows)[:, None] * cfg.row_pages * cfg.page_records(0)
    newest = np.arange(max(history - cfg.tail, 0), history)
    ring = np.zeros(cfg.tail, np.int64)
    ring[newest % cfg.tail] = newest
    of = lambda positions: (base + np.maximum(positions, 0)) % cfg.host_rows(0) % PATTERN
    member = np.arange(members)[:, None, None] * PATTERN
    parts = [(member + of(positions)[None]).reshape(-1) for positions in (held, ring)]
    return np.concatenate([*parts, np.zeros(rows * cfg.staging(hot))]).astype(np.int32)


def warm_state(
    cfg: HierarchyConfig, made: list[Pattern], hosts: list[HostPool], history: int
) -> HierarchyState:
    """A hierarchy whose rows all have a request of `history` positions."""
    every = [tables(cfg, hot, history) for hot in range(len(cfg.hot_pools))]
    device = SingleDeviceSharding(jax.devices()[0])

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        names = [getattr(key, "name", None) for key in path]
        name = names[-1]
        if names[0] == "pools":
            return _pool_leaf(path[1].idx, name or "", leaf)
        if names[0] == "hot" and name == "slots":
            stacked = [made[pool].records for pool in cfg.hot_pools[path[1].idx]]
            return _taken(jnp.concatenate(stacked), jnp.asarray(every[path[1].idx].content))
        if names[0] == "hot":
            return getattr(every[path[1].idx], name or "")
        return _rest(cfg, name or "", leaf, history)

    def _pool_leaf(pool: int, name: str, leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        hot, member = cfg.hot_pool_of(pool)
        if name in HOST_LEAVES:
            return getattr(hosts[pool], name)
        if name in ("slot_of", "pages"):
            return getattr(every[hot], name)[member]
        return leaf  # index keys, below

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        found = value(path, leaf)
        if path[-1].name in HOST_LEAVES or found is leaf:
            return found
        return jax.device_put(jnp.asarray(found), device)

    state = jax.tree_util.tree_map_with_path(placed, abstract(cfg))
    keys = [
        jax.device_put(
            _history_keys(pattern.keys, cfg.requests, cfg.records(0), cfg.host_rows(0)), device
        )
        for pattern in made
    ]
    return _with_keys(state, keys)


def _with_keys(state: HierarchyState, keys: list[StoredKeys]) -> HierarchyState:
    pools = tuple(
        dataclasses.replace(pool, index_keys=stored)
        for pool, stored in zip(state.pools, keys, strict=True)
    )
    return dataclasses.replace(state, pools=pools)


def _rest(cfg: HierarchyConfig, name: str, leaf: jax.ShapeDtypeStruct, history: int) -> Any:  # noqa: ANN401
    """Leaves that are neither of a pool nor of a hot pool."""
    if name == "host_page_of":
        number = np.arange(cfg.requests * cfg.row_pages, dtype=np.int32)
        return (number % cfg.host_page_count).reshape(leaf.shape)
    newest = min(max(history + cfg.fresh(0) - cfg.tail, 0), cfg.hot_slots(0))
    held = {"budget": cfg.share_pages(0), "hot_records": newest}
    full = {"length": history, "active": True, **held, **FILL}
    return jnp.full(leaf.shape, full.get(name, 0), leaf.dtype)


@jax.jit
def _taken(pattern: Int[Array, "P W"], content: Int[Array, " S"]) -> Int[Array, "S W"]:
    return pattern.at[content].get(mode="promise_in_bounds")


@partial(jax.jit, static_argnums=(1, 2, 3))
def _history_keys(keys: StoredKeys, rows: int, records: int, host_rows: int) -> StoredKeys:
    """Row r, position c has the key of host row r * records + c: pages are whole."""
    number = jnp.arange(rows * records, dtype=jnp.int32) % host_rows % KEY_PATTERN
    return jax.tree.map(lambda leaf: leaf[number].reshape(rows, records, *leaf.shape[1:]), keys)
