"""Cells of the decode benchmark: a policy and a draft at a load, its programs and its state."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int

from bench.replayed import ReplayedDraft, ReplayedDrafter
from bench.shard_model import ShardModel, ShardParams
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.output import Packed, packed_steps
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.admit import readmit
from dhisparse_jax.hierarchy.formats import stored_keys, stored_rows
from dhisparse_jax.hierarchy.keys import packed_keys
from dhisparse_jax.hierarchy.state import (
    FILL,
    HOST_LEAVES,
    HierarchyState,
    abstract,
    host_sharding,
)
from dhisparse_jax.speculation.protocol import Drafter, DraftState, NoDraft
from dhisparse_jax.speculation.ring import Ring
from dhisparse_jax.speculation.schedule import Profile, init_load
from dhisparse_jax.step import DecodeState, Speculation, no_texts

PATTERN = 4096
"""Random records that host pools repeat; what they hold changes no time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured.

    Attributes:
        name: of the row in the result.
        policy: how budgets are set.
        draft: name of the draft, or "none".
        requests: at the same time.
        hot_rows: hot slots per request and pool, on average.
    """

    name: str
    policy: Policy
    draft: str
    requests: int
    hot_rows: int

    def config(self, geometry: Geometry, capacity: int, queries: int, pages: int) -> HierarchyConfig:
        """Sizes of its hierarchy; `pages` of host memory, whatever the cell."""
        return HierarchyConfig(
            geometry=geometry,
            policy=self.policy,
            requests=self.requests,
            capacity=capacity,
            queries=queries,
            hot_rows=self.hot_rows,
            tail=max(16, 2 * queries),
            host_pages=pages,
        )


class HostPool(NamedTuple):
    """The host arrays of a pool."""

    host: Int[Array, "H W"]
    host_keys: Int[Array, "H Wk"]


class Programs(NamedTuple):
    """The jitted functions of a cell: `step` of the whole library, `join` and `readmit` of it."""

    step: Any
    join: Any
    readmit: Any


def programs(model: ShardModel, drafter: Drafter, cfg: HierarchyConfig) -> Programs:
    """Of a model, a drafter, and sizes."""
    return Programs(
        step=jax.jit(
            partial(packed_steps, 1, model, Speculation(drafter), cfg), donate_argnums=(3, 4)
        ),
        join=jax.jit(partial(_join_all, cfg), donate_argnums=0),
        readmit=jax.jit(partial(_readmit, cfg), static_argnums=1, donate_argnums=0),
    )


def replaying(drafter: Drafter, vocabulary: int) -> Drafter:
    """A drafter with replayed acceptance, if it proposes anything."""
    return ReplayedDrafter(drafter, vocabulary) if drafter.length else NoDraft()


def host_pools(cfg: HierarchyConfig, seed: int = 0) -> list[HostPool]:
    """Host pools full of random records and index keys, made on the device and written out once."""
    made = []
    for pool, layers in enumerate(cfg.geometry.layers_per_pool):
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), pool)
        made.append(
            HostPool(
                _filled(_records, cfg, layers, cfg.record_words(pool), key),
                _filled(_keys, cfg, layers, cfg.key_words, key),
            )
        )
    return made


@partial(jax.jit, static_argnums=(0, 1, 2))
def _records(cfg: HierarchyConfig, layers: int, words: int, key: Array) -> Int[Array, "H W"]:
    row = cfg.geometry.row
    values = jax.random.normal(key, (PATTERN, layers, row.width), jnp.float32)
    records = stored_rows(row, values).reshape(PATTERN, -1)
    return _repeated(jnp.pad(records, ((0, 0), (0, words - records.shape[1]))), cfg.host_rows)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _keys(cfg: HierarchyConfig, _: int, words: int, key: Array) -> Int[Array, "H Wk"]:
    values = jax.random.normal(key, (PATTERN, cfg.geometry.index_width), jnp.float32)
    return _repeated(packed_keys(stored_keys(cfg.geometry, values), words), cfg.host_rows)


def _repeated(pattern: Int[Array, "n W"], rows: int) -> Int[Array, "rows W"]:
    return pattern[jnp.arange(rows, dtype=jnp.int32) % pattern.shape[0]]


def _filled(make: Any, cfg: HierarchyConfig, layers: int, words: int, key: Array) -> Array:  # noqa: ANN401
    """The array in host memory; the one on the device is gone before the next is made."""
    made = make(cfg, layers, words, key)
    placed = jax.device_put(made, host_sharding())
    placed.block_until_ready()
    return placed


def empty_state(cfg: HierarchyConfig, pools: list[HostPool]) -> HierarchyState:
    """As `hierarchy.state.init`, over host pools that are there already."""
    device = SingleDeviceSharding(jax.devices()[0])

    def allocate(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name = getattr(path[-1], "name", "")
        if name in HOST_LEAVES:
            return getattr(pools[path[1].idx], name)
        return jax.device_put(_full(leaf, FILL.get(name, 0)), device)

    return jax.tree_util.tree_map_with_path(allocate, abstract(cfg))


def _full(leaf: jax.ShapeDtypeStruct, value: int) -> Array:
    return jnp.full(leaf.shape, value, leaf.dtype)


def hosts_of(state: HierarchyState) -> list[HostPool]:
    """The host arrays of a state whose other leaves are not needed any more."""
    return [HostPool(pool.host, pool.host_keys) for pool in state.pools]


def admit_all(programs: Programs, state: HierarchyState, history: int) -> HierarchyState:
    """Every row gets a request of `history` positions, which it finds in its host pages."""
    state = programs.join(state, jnp.int32(history))
    rows = state.active.shape[0]
    for pool in range(len(state.pools)):
        for row in range(rows):
            state = programs.readmit(state, pool, jnp.int32(row))
    return state


def _join_all(
    cfg: HierarchyConfig, state: HierarchyState, length: Int[Array, ""]
) -> HierarchyState:
    pages = jnp.arange(cfg.requests * cfg.row_pages, dtype=jnp.int32).reshape(cfg.requests, -1)
    for row in range(cfg.requests):
        state = requests.join(state, cfg, jnp.int32(row), length, pages[row])
    return state


def _readmit(
    cfg: HierarchyConfig, state: HierarchyState, pool: int, row: Int[Array, ""]
) -> HierarchyState:
    return readmit(state, cfg, pool, row)


def full_ring(state: DraftState, history: int) -> DraftState:
    """Draft rings as they are after `history` positions, with random content."""
    if not isinstance(state, Ring):
        return state
    keys, values = (
        jax.random.normal(jax.random.key(number), leaf.shape, leaf.dtype)
        for number, leaf in enumerate((state.keys, state.values))
    )
    return Ring(keys=keys, values=values, next=jnp.full_like(state.next, history))


def decode_state(
    cfg: HierarchyConfig,
    drafter: Drafter,
    hierarchy: HierarchyState,
    text: Int[Array, "R T"],
    history: int,
) -> DecodeState:
    """Everything that a step changes, for requests that have just been admitted."""
    texts = no_texts(cfg.requests)
    texts = dataclasses.replace(
        texts, anchor=text[:, 0], end=jnp.full_like(texts.end, cfg.capacity - cfg.queries)
    )
    state = DecodeState(
        hierarchy=hierarchy,
        draft=full_ring(drafter.init(cfg.requests), history),
        load=init_load(cfg.requests, drafter.length),
        texts=texts,
    )
    device = SingleDeviceSharding(jax.devices()[0])
    beside = dataclasses.replace(state, hierarchy=())  # its leaves are where they belong
    return dataclasses.replace(jax.device_put(beside, device), hierarchy=hierarchy)


def no_profile(cfg: HierarchyConfig) -> Profile:
    """The rule is to verify all, which asks for no profile."""
    table = jnp.zeros(cfg.requests * cfg.queries + 1, jnp.float32)
    return Profile(step_seconds=table, byte_seconds=jnp.zeros((), jnp.float32))


def abstract_operands(
    cfg: HierarchyConfig, drafter: Drafter, params: ShardParams, draft: ReplayedDraft | tuple[()]
) -> tuple[Any, ...]:
    """Shapes of what a step takes, for a compilation without a device."""
    rows, t = cfg.requests, cfg.queries
    from dhisparse_jax.engine.output import places

    state = DecodeState(
        hierarchy=abstract(cfg),
        draft=jax.eval_shape(lambda: drafter.init(rows)),
        load=jax.eval_shape(lambda: init_load(rows, t - 1)),
        texts=jax.eval_shape(lambda: no_texts(rows)),
    )
    place: Packed = jax.eval_shape(lambda: places(cfg, 1)[0])
    return params, draft, jax.eval_shape(lambda: no_profile(cfg)), state, place
