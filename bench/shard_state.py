"""The hierarchy as long decoding leaves it, without any of it: host pools, tables, hot slots, keys.

Every row holds a request of the same length, and every pool with the same rate the same number of
pages. They hold what an admission puts there (`hierarchy.admit`): the
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
from dhisparse_jax.geometry import Geometry, Kept
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


class Pattern(NamedTuple):
    """What a pool repeats: records, and index keys as stored."""

    records: Int[Array, "P W"]
    keys: StoredKeys


class HostPool(NamedTuple):
    """The host arrays of a pool."""

    host: Int[Array, "H W"]
    host_keys: Int[Array, "H Wk"]


def patterns(cfg: HierarchyConfig) -> list[Pattern]:
    """The pattern of every pool; the same for all cells of a model.

    Of random keys more than a history has: no real one has so many ties that the selection would be
    most of the work.
    """
    words, keys = cfg.record_words, 2 ** cfg.capacity.bit_length() - 1
    return [
        _pattern(cfg.geometry, layers, words(pool), keys, pool)
        for pool, layers in enumerate(cfg.geometry.layers_per_pool)
    ]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _pattern(
    geometry: Geometry, layers: int, words: int, keys: int, seed: Int[Array, ""]
) -> Pattern:
    shapes = [(PATTERN, layers, geometry.row.width), (keys, geometry.index_width)]
    wanted = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    values, numbers = random_like(wanted, seed)
    records = stored_rows(geometry.row, values).reshape(PATTERN, -1)
    return Pattern(
        records=jnp.pad(records, ((0, 0), (0, words - records.shape[1]))),
        keys=stored_keys(geometry, numbers),
    )


@partial(jax.jit, static_argnums=1)
def _repeated(pattern: Int[Array, "P W"], rows: int) -> Int[Array, "rows W"]:
    return pattern[jnp.arange(rows, dtype=jnp.int32) % pattern.shape[0]]


def host_pools(cfg: HierarchyConfig, made: list[Pattern]) -> list[HostPool]:
    """Host pools, made on the device and written out, one array at a time."""

    def placed(pattern: Int[Array, "P W"], rows: int) -> Array:
        array = jax.device_put(_repeated(pattern, rows), host_sharding())
        return array.block_until_ready()

    packed, pools = jax.jit(packed_keys, static_argnums=1), list[HostPool]()
    for pool, pattern in enumerate(made):
        keys = packed(pattern.keys, cfg.record_layout)
        rows = cfg.host_rows(pool)
        pools.append(HostPool(placed(pattern.records, rows), placed(keys, rows)))
    return pools


def hosts_of(state: HierarchyState) -> list[HostPool]:
    """The host arrays of a state whose other leaves are not needed any more."""
    pools: list[HostPool] = []
    for pool in state.pools:
        assert pool.host_keys is not None, "the model has an index"
        pools.append(HostPool(pool.host, pool.host_keys))
    return pools


class Tables(NamedTuple):
    """What says where records are, for all pools of a hot pool; see `hierarchy.state`."""

    slot_of: list[Int[np.ndarray, "R C"]]
    pages: list[Int[np.ndarray, "R Pmax"]]
    owner: Int[np.ndarray, " P"]
    position: Int[np.ndarray, " page_slots"]
    mark: Int[np.ndarray, " page_slots"]
    content: Int[np.ndarray, " S"]


class _Held(NamedTuple):
    """What a pool has in its page slots: of each request, and of all."""

    record: Int[np.ndarray, " n"]
    mark: Int[np.ndarray, " n"]
    slot_of: Int[np.ndarray, "R C"]
    pages: Int[np.ndarray, "R Pmax"]


def tables(cfg: HierarchyConfig, hot: int, history: int) -> Tables:
    """Every pool and request holds `share_pages` pages in a row, full of the newest records.

    `content` says which record of the stacked patterns each slot holds.
    """
    rows, first, every = cfg.requests, 0, list[_Held]()
    for pool in cfg.hot_pools[hot]:
        every.append(_held(cfg, pool, history, first))
        first += rows * cfg.hot_slots(pool)
    owners = [
        np.repeat(pool * rows + np.arange(rows), cfg.share_pages(pool))
        for pool in cfg.hot_pools[hot]
    ]
    return Tables(
        slot_of=[held.slot_of for held in every],
        pages=[held.pages for held in every],
        owner=np.concatenate(owners).astype(np.int32),
        position=np.concatenate([np.tile(held.record, rows) for held in every]),
        mark=np.concatenate([np.tile(held.mark, rows) for held in every]),
        content=_content(cfg, hot, [held.record for held in every], history),
    )


def held_records(cfg: HierarchyConfig, pool: int, history: int) -> int:
    """Records of a request in the page slots of a pool."""
    return min(_end(cfg, pool, history), cfg.hot_slots(pool))


def _end(cfg: HierarchyConfig, pool: int, history: int) -> int:
    """The first record that is in the tail alone."""
    return max(history // cfg.geometry.rate(pool) + cfg.fresh(pool) - cfg.tail, 0)


def _held(cfg: HierarchyConfig, pool: int, history: int, first: int) -> _Held:
    """The pages of one pool, whose slots begin with `first`."""
    rows, size = cfg.requests, cfg.hot_slots(pool)
    end, count = _end(cfg, pool, history), held_records(cfg, pool, history)
    place = np.arange(size, dtype=np.int32)
    record = np.where(place < count, end - count + place, NO_SLOT).astype(np.int32)
    begin = first + size * np.arange(rows, dtype=np.int32)[:, None]
    slot_of = np.full((rows, cfg.records(pool)), NO_SLOT, np.int32)
    slot_of[:, end - count : end] = begin + place[:count]
    pages = np.full((rows, cfg.max_pages(pool)), NO_SLOT, np.int32)
    shared = cfg.share_pages(pool)
    pages[:, :shared] = begin // cfg.page_slots + np.arange(shared, dtype=np.int32)
    mark = np.where(record >= 0, 1 - (end - record), 0).astype(np.int32)
    return _Held(record, mark, slot_of, pages)


def _content(
    cfg: HierarchyConfig, hot: int, held: list[Int[np.ndarray, " n"]], history: int
) -> Int[np.ndarray, " S"]:
    """Record of the stacked patterns in every slot: pages, tails, staging."""
    paged, tails = list[np.ndarray](), list[np.ndarray]()
    for member, (pool, own) in enumerate(zip(cfg.hot_pools[hot], held, strict=True)):
        end = history // cfg.geometry.rate(pool)
        newest = np.arange(max(end - cfg.tail, 0), end)
        ring = np.zeros(cfg.tail, np.int64)
        ring[newest % cfg.tail] = newest
        size = cfg.row_pages * cfg.page_records(pool)
        first = np.arange(cfg.requests)[:, None] * size
        for parts, records in ((paged, own), (tails, ring)):
            host_row = (first + np.maximum(records, 0)) % cfg.host_rows(pool)
            parts.append((member * PATTERN + host_row % PATTERN).astype(np.int32).reshape(-1))
    staged = np.zeros(cfg.requests * cfg.staging(hot), np.int32)
    return np.concatenate([*paged, *tails, staged])


def warm_state(
    cfg: HierarchyConfig, made: list[Pattern], hosts: list[HostPool], history: int
) -> HierarchyState:
    """A hierarchy whose rows all have a request of `history` positions."""
    every = [tables(cfg, hot, history) for hot in range(len(cfg.hot_pools))]
    device = SingleDeviceSharding(jax.devices()[0])

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        first, name = (getattr(key, "name", None) for key in (path[0], path[-1]))
        if first == "pools":
            pool, (hot, member) = path[1].idx, cfg.hot_pool_of(path[1].idx)
            return _pool_leaf(cfg, pool, path, leaf, hosts[pool], every[hot], member)
        if first == "hot" and name == "slots":
            stacked = [made[pool].records for pool in cfg.hot_pools[path[1].idx]]
            return _taken(jnp.concatenate(stacked), jnp.asarray(every[path[1].idx].content))
        if first == "hot":
            return getattr(every[path[1].idx], name or "")
        return _rest(cfg, name or "", leaf, history)

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        found = value(path, leaf)
        if getattr(path[-1], "name", "") in HOST_LEAVES or found is leaf:
            return found
        return jax.device_put(jnp.asarray(found), device)

    state = jax.tree_util.tree_map_with_path(placed, abstract(cfg))
    keys = [
        jax.device_put(
            _history_keys(pattern.keys, cfg.requests, cfg.records(pool), cfg.host_rows(pool)),
            device,
        )
        for pool, pattern in enumerate(made)
    ]
    return _with_keys(state, keys)


def _pool_leaf(
    cfg: HierarchyConfig,
    pool: int,
    path: tuple[Any, ...],
    leaf: jax.ShapeDtypeStruct,
    host: HostPool,
    held: Tables,
    member: int,
) -> Any:  # noqa: ANN401
    """A leaf of a pool; the shape of index keys stays."""
    name = getattr(path[-1], "name", None)
    if name is None:
        return _kept(cfg.geometry.kept_of(pool)[path[-1].idx], leaf, path[-1].idx)
    if name in HOST_LEAVES:
        return getattr(host, name)
    return getattr(held, name)[member] if name in ("slot_of", "pages") else leaf


def _kept(kept: Kept, leaf: jax.ShapeDtypeStruct, seed: int) -> Array:
    """Random rows of what layers keep beside records."""
    if kept.dtype != "int32":
        return random_like(leaf, seed)
    if kept.row is None:  # tokens
        return jnp.zeros(leaf.shape, leaf.dtype)
    numbers = jax.ShapeDtypeStruct((*leaf.shape[:2], kept.row.width), jnp.float32)
    rows = stored_rows(kept.row, random_like(numbers, seed))
    return jnp.pad(rows, ((0, 0), (0, 0), (0, leaf.shape[-1] - rows.shape[-1])))


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
    pools = range(cfg.pools)
    per_pool = lambda of: np.asarray([of(pool) for pool in pools])[:, None]
    held = {
        "budget": per_pool(cfg.share_pages),
        "hot_records": per_pool(lambda pool: held_records(cfg, pool, history)),
    }
    full = {"length": history, "active": True, **held, **FILL}
    return jnp.full(leaf.shape, full.get(name, 0), leaf.dtype)


@jax.jit
def _taken(pattern: Int[Array, "P W"], content: Int[Array, " S"]) -> Int[Array, "S W"]:
    return pattern.at[content].get(mode="promise_in_bounds")


@partial(jax.jit, static_argnums=(1, 2, 3))
def _history_keys(keys: StoredKeys, rows: int, records: int, host_rows: int) -> StoredKeys:
    """Row r, position c has the key of host row r * records + c: pages are whole."""
    count = jax.tree.leaves(keys)[0].shape[0]
    number = jnp.arange(rows * records, dtype=jnp.int32) % host_rows % count
    return jax.tree.map(lambda leaf: leaf[number].reshape(rows, records, *leaf.shape[1:]), keys)
