"""The state of a hierarchy: one pytree, the same tree and shapes for every load.

Dimensions: R request rows, C records per request (of a pool), W words of a record, Pmax pages per
request, P pages and S slots of a hot pool, N host pages per request, H rows of a host pool. On a
TPU the words of a record have two dimensions (`pallas_kernels.common.record_layout`).
`NO_SLOT` (-1) marks what is empty in every index table.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.formats import key_shapes
from dhisparse_jax.pytree import state
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.interpret import interprets_tpu
from pallas_kernels.index_scores.types import Keys
from pallas_kernels.plan.types import PlanCounts

HOST_KIND = "pinned_host"
"""The memory kind of host pools."""

HOST_LEAVES = ("host", "host_keys")
"""The leaves that are in host memory."""

FILL = {
    "step": 1,
    **dict.fromkeys(
        ("slot_of", "pages", "owner", "position", "host_page_of", "ghost", "selection"), NO_SLOT
    ),
}
"""What the leaves of an empty state are full of; the others of zeros."""


@state
class PoolState:
    """One pool: all records with one residency map.

    Attributes:
        host: the authoritative copy of every committed record; rows as in `layout`. Its memory
            kind is `pinned_host` where the backend has it.
        host_keys: a copy of the index key of every committed position, packed; rows and memory kind
            of `host`. Decode steps do not read it: whoever comes back to the device does. None
            without index keys.
        slot_of: hot slot of every position.
        pages: ids of the pages that each request holds, NO_SLOT after the last.
        index_keys: index keys of the whole history, on device; valid for the records of `length`.
            Empty without index keys.
        kept: what the layers keep beside records, by `Geometry.kept`; see `kept`.
    """

    host: Int[Array, "H *W"]
    host_keys: Int[Array, "H *Wk"] | None
    slot_of: Int[Array, "R C"]
    pages: Int[Array, "R Pmax"]
    index_keys: Keys
    kept: tuple[Shaped[Array, "R _ _"], ...] = ()


@state
class HotPool:
    """The device copy of some records of all pools with one record size.

    Attributes:
        slots: records; regions as in `layout`.
        owner: pool * R + request that holds each page, NO_SLOT if it is free.
        position: position that each page slot holds, NO_SLOT if it is empty.
        mark: step at which each page slot was last used.
    """

    slots: Int[Array, "S *W"]
    owner: Int[Array, " P"]
    position: Int[Array, " page_slots"]
    mark: Int[Array, " page_slots"]


@state
class Benefit:
    """What a page more would have saved each holder, as far as that was seen. See `ghost`.

    Attributes:
        ghost: positions that were evicted last and are not back, the newest first, NO_SLOT after
            them. None unless the policy is adaptive.
        looked: ghost positions that the last step could have fetched again.
        refetched: how many of them it did.
        tried: sum of `looked` in pages, page-steps, past steps weighing less and less, over the
            steps that the request took part in.
        saved: sum of `refetched`, likewise; in proportion to what is held now.
    """

    ghost: Int[Array, "pools R G"] | None
    looked: Int[Array, "pools R"]
    refetched: Int[Array, "pools R"]
    tried: Float[Array, "pools R"]
    saved: Float[Array, "pools R"]


@state
class HierarchyState:
    """The whole hierarchy.

    Attributes:
        pools: one per selection group.
        hot: one per record size.
        host_page_of: host pages of each request in the order of its positions, NO_SLOT after the
            last; the same in every pool.
        length: committed positions of each request.
        active: whether a request occupies the row.
        budget: pages that each request holds in each pool.
        hot_records: records of each request that have a hot slot in each pool: what one would count
            in `slot_of`, which is as large as the history.
        miss_rate: fetched records per step that the request took part in, a moving average.
        benefit: what a page more would have saved.
        counts: what this step's plans found, per pool and request.
        selection: positions that this step's queries select, NO_SLOT fills up, the last ones where
            a pool is selected from several times. None unless selections are recorded.
        step: steps so far, plus one; a step counts once more for every further selection.
        geometry: what it was made for; static. No other reads its bytes as they were written.
    """

    pools: tuple[PoolState, ...]
    hot: tuple[HotPool, ...]
    host_page_of: Int[Array, "R N"]
    length: Int[Array, " R"]
    active: Bool[Array, " R"]
    budget: Int[Array, "pools R"]
    hot_records: Int[Array, "pools R"]
    miss_rate: Float[Array, "pools R"]
    benefit: Benefit
    counts: PlanCounts
    selection: Int[Array, "pools R T K"] | None
    step: Int[Array, ""]
    geometry: Geometry = dataclasses.field(metadata={"static": True})


def host_sharding(device: jax.Device | None = None) -> SingleDeviceSharding:
    """Where host pools live: `pinned_host` of `device` if it has the kind, else its default.

    The default, too, where TPU kernels are interpreted: JAX cannot lower a program with their
    ordered callbacks and an array of another memory kind (0.10.2: it forgets the callbacks' tokens
    when it lists the kinds of the results).
    """
    device = device or jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    pinned = HOST_KIND in kinds and not interprets_tpu()
    return SingleDeviceSharding(device, memory_kind=HOST_KIND if pinned else None)


def abstract(cfg: HierarchyConfig) -> HierarchyState:
    """Shapes and dtypes of the state: the single source of its sizes."""
    r, i32 = cfg.requests, jnp.int32
    shape = _leaf
    per_pool, average = shape((cfg.pools, r), i32), shape((cfg.pools, r), jnp.float32)
    pools = tuple(
        PoolState(
            host=shape((cfg.host_rows(pool), *cfg.record_shape(pool)), i32),
            host_keys=_unless_empty((cfg.host_rows(pool), *cfg.key_shape)),
            slot_of=shape((r, cfg.records(pool)), i32),
            pages=shape((r, cfg.max_pages(pool)), i32),
            index_keys=key_shapes(cfg.geometry, r, cfg.records(pool)),
            kept=tuple(
                shape((r, kept.rows(cfg.capacity, cfg.queries), kept.width), kept.dtype)
                for kept in cfg.geometry.kept_of(pool)
            ),
        )
        for pool in range(cfg.pools)
    )
    return HierarchyState(
        pools=pools,
        hot=tuple(_abstract_hot(cfg, number) for number in range(len(cfg.hot_pools))),
        host_page_of=shape((r, cfg.row_pages), i32),
        length=shape((r,), i32),
        active=shape((r,), jnp.bool_),
        budget=per_pool,
        hot_records=per_pool,
        miss_rate=average,
        benefit=Benefit(
            ghost=_unless_empty((cfg.pools, r, cfg.ghosts)),
            looked=per_pool,
            refetched=per_pool,
            tried=average,
            saved=average,
        ),
        counts=PlanCounts(*(per_pool for _ in PlanCounts._fields)),
        selection=_unless_empty((cfg.pools, r, cfg.queries, cfg.recorded)),
        step=shape((), i32),
        geometry=cfg.geometry,
    )


def _leaf(shape: tuple[int, ...], dtype: DTypeLike) -> Any:  # noqa: ANN401
    """A shape in place of an array, as JAX's own functions take and return them."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _unless_empty(shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    """The shape of ids; None where there are none: Orbax stores no array without elements."""
    return _leaf(shape, jnp.int32) if math.prod(shape) else None


def _abstract_hot(cfg: HierarchyConfig, number: int) -> HotPool:
    record = cfg.record_shape(cfg.hot_pools[number][0])
    paged = _leaf((layout.page_region(cfg, number),), jnp.int32)
    return HotPool(
        slots=_leaf((layout.slots(cfg, number), *record), jnp.int32),
        owner=_leaf((layout.pages(cfg, number),), jnp.int32),
        position=paged,
        mark=paged,
    )


def init(cfg: HierarchyConfig, device: jax.Device | None = None) -> HierarchyState:
    """An empty hierarchy: no request, no record, every page free; on the first device by default.

    Every leaf is committed to its device, as the leaves that a jitted function returns for it are:
    JAX compiles anew for an array that is committed where the last one was not.
    """
    device = device or jax.local_devices()[0]
    host = host_sharding(device)

    def allocate(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = getattr(path[-1], "name", None)
        if name in HOST_LEAVES:
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype), host)
        return jax.device_put(jnp.full(leaf.shape, FILL.get(name or "", 0), leaf.dtype), device)

    return jax.tree_util.tree_map_with_path(allocate, abstract(cfg))
