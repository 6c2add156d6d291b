"""Sizes of the state and of a prompt in bytes, and whether they fit into the memory there is."""

import contextlib
import dataclasses
import gc
import math
import os

import jax
import numpy as np
import psutil

from dhisparse_jax.config import MAX_PAGE_SLOTS, HierarchyConfig, Policy
from dhisparse_jax.engine.compiled import Compiled
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HOST_KIND, HOST_LEAVES, abstract
from dhisparse_jax.model import Params
from dhisparse_jax.prefill import empty_prompt, padded_capacity
from dhisparse_jax.speculation.protocol import NO_DRAFT, Drafter

PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable that bounds pinned host memory on a GPU, in GB."""

PINNED_LIMIT_DEFAULT_GB = 64
"""The bound where it is not set."""

HOT_SHARE = 0.5
"""Share of the free device memory that hot pools may take when no budget is given."""

CPU_HOT_ROWS_PER_K = 4
"""On a CPU both tiers are the same memory, so it says nothing about the budget: take 4 K."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a state, and of what is beside it while a prompt is being prefilled.

    Attributes:
        host_bytes: host pools, and the copies of the index keys beside them.
        hot_bytes: page slots of the hot pools.
        tail_bytes: tails.
        staging_bytes: staging slots.
        index_bytes: index keys.
        table_bytes: slot maps, page tables and marks.
        draft_bytes: what the drafter keeps of every request.
        kept_bytes: what layers keep beside records and index keys.
        prefill_bytes: the prompt that is in prefill; see `prompt_bytes`.
    """

    host_bytes: int
    hot_bytes: int
    tail_bytes: int
    staging_bytes: int
    index_bytes: int
    table_bytes: int
    draft_bytes: int = 0
    kept_bytes: int = 0
    prefill_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Everything but the host pools."""
        return sum(dataclasses.astuple(self)) - self.host_bytes


def sizes(
    cfg: HierarchyConfig, drafter: Drafter = NO_DRAFT.drafter, prefill_bytes: int = 0
) -> Sizes:
    """Bytes of a state of these sizes, with a prompt of so many bytes beside it."""
    size, state = _bytes, abstract(cfg)
    regions = [_regions(cfg, number) for number in range(len(cfg.hot_pools))]
    hot, tail, staging = (sum(column) for column in zip(*regions, strict=True))
    in_host = [getattr(pool, name) for pool in state.pools for name in HOST_LEAVES]
    host = sum(size(leaf) for leaf in jax.tree.leaves(in_host))
    index = sum(size(leaf) for pool in state.pools for leaf in jax.tree.leaves(pool.index_keys))
    every = sum(size(leaf) for leaf in jax.tree.leaves(state))
    beside = sum(size(leaf) for pool in state.pools for leaf in pool.kept)
    tables = every - host - index - hot - tail - staging - beside
    ring = jax.eval_shape(lambda: drafter.init(cfg.requests))
    draft = sum(size(leaf) for leaf in jax.tree.leaves(ring))
    return Sizes(host, hot, tail, staging, index, tables, draft, beside, prefill_bytes)


def prompt_bytes(cfg: HierarchyConfig, compiled: Compiled, params: Params) -> int:
    """Bytes of a prompt in prefill, whatever its length: arrays have room for the whole capacity.

    They are its hidden states, with what a drafter reads of them, and its records and index keys in
    one pool, here the largest.
    """
    chunk = compiled.chunk
    tokens = jax.ShapeDtypeStruct((padded_capacity(cfg, chunk),), np.int32)
    hidden = jax.eval_shape(compiled.embed, params, tokens, np.int32(0))
    pools = [
        jax.eval_shape(lambda pool=pool: empty_prompt(cfg, pool, chunk))
        for pool in range(cfg.pools)
    ]
    size = lambda tree: sum(map(_bytes, jax.tree.leaves(tree)))
    return size(hidden) + max(map(size, pools))


def _bytes(leaf: jax.ShapeDtypeStruct | jax.Array) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _regions(cfg: HierarchyConfig, number: int) -> tuple[int, int, int]:
    record = cfg.record_bytes(cfg.hot_pools[number][0])
    slots = (
        layout.page_region(cfg, number),
        layout.tail_region(cfg, number),
        cfg.requests * cfg.staging(number),
    )
    return tuple(record * count for count in slots)  # type: ignore[return-value]


def free_device_bytes() -> int:
    """Memory that the first device can still give."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return free_memory_bytes()
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def free_memory_bytes() -> int:
    """Host memory that plain arrays can take."""
    return psutil.virtual_memory().available


def free_host_bytes() -> int:
    """Memory that host pools can take: free memory, and what is left of a pinned limit."""
    free = free_memory_bytes()
    if jax.default_backend() != "gpu":
        return free
    return min(free, max(0, pinned_limit_bytes() - pinned_bytes()))


def pinned_bytes() -> int:
    """Pinned host memory that arrays of this process are in; JAX counts none of it."""
    gc.collect()  # an engine that nobody has any more is in cycles, which hold its pools
    pinned = [leaf for leaf in jax.live_arrays() if leaf.sharding.memory_kind == HOST_KIND]
    parts = [part.data for leaf in pinned for part in leaf.addressable_shards]
    # An array of a mesh and those of its devices are the same bytes.
    return sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts}.values())


def pinned_limit_bytes() -> int:
    """Pinned host memory that JAX gives at most on a GPU.

    Raises:
        UserError: the variable that bounds it is not a number of GB.
    """
    limit = os.environ.get(PINNED_LIMIT_VARIABLE, str(PINNED_LIMIT_DEFAULT_GB))
    with contextlib.suppress(ValueError):
        size = float(limit)
        if math.isfinite(size) and size >= 0:
            return int(size * 2**30)
    raise UserError(
        f"{PINNED_LIMIT_VARIABLE}={limit} is not a number of GB; set it to one, as 64, or unset it"
    )


def default_hot_rows(geometry: Geometry, requests: int, capacity: int) -> int:
    """Hot slots per request when the user names none.

    On an accelerator, what half of the free device memory holds, in whole pages of the largest size
    if that is one, but not more than the history; on a CPU, where both tiers are one memory, 4 K.
    """
    if jax.default_backend() == "cpu":
        return min(capacity, CPU_HOT_ROWS_PER_K * geometry.top_k)
    probe = HierarchyConfig(
        geometry=geometry,
        policy=Policy.FIXED,
        requests=requests,
        capacity=capacity,
        hot_rows=1,
        host_page=geometry.whole,  # any that is possible
    )
    per_row = requests * sum(4 * probe.record_words(pool) for pool in range(probe.pools))
    rows = int(HOT_SHARE * free_device_bytes()) // per_row
    return max(1, min(capacity, rows - rows % MAX_PAGE_SLOTS or rows))


def _smaller_device(cfg: HierarchyConfig, needed: Sizes, batch: int) -> str:
    """The largest part of the device memory that is needed, and what makes it smaller."""
    hot = "use --policy adaptive"
    if cfg.policy is not Policy.RESIDENT:
        hot = f"lower --hot-rows (now {cfg.hot_rows})"
    room = f"shorten the texts (room for {cfg.capacity:,} tokens each)"
    block = f"use a shorter --draft-length (now {cfg.queries - 1}) or --draft none"
    beside = needed.tail_bytes + needed.staging_bytes + needed.draft_bytes
    parts = [
        (needed.hot_bytes, "pages", hot),
        (needed.index_bytes, "index keys", f"{room}, use --index-format fp8"),
        (needed.table_bytes + needed.kept_bytes, "tables and windows", room),
        (beside, "tails, staging and the draft", block if cfg.queries > 1 else hot),
        (needed.prefill_bytes, "a prompt in prefill", room),
    ]
    size, name, remedy = max(parts)
    return f"{gib(size)} of it are {name}: {remedy}, or lower --batch (now {batch})"


def gib(size: int) -> str:
    """Bytes, as a person reads them."""
    return f"{size / 2**30:.2f} GiB"


def check_memory(
    cfg: HierarchyConfig,
    drafter: Drafter = NO_DRAFT.drafter,
    devices: int = 1,
    prefill_bytes: int = 0,
) -> Sizes:
    """The sizes of the state of one device, if it fits with a prompt beside it.

    Args:
        cfg: sizes of its hierarchy.
        drafter: of its draft.
        devices: how many like it are beside each other in one host memory, this one included.
        prefill_bytes: of a prompt in prefill.

    Raises:
        UserError: with what is needed, what there is, and what to change.
    """
    needed = sizes(cfg, drafter, prefill_bytes)
    on_cpu, batch = jax.default_backend() == "cpu", devices * cfg.requests
    free = free_device_bytes()
    device_bytes = needed.device_bytes * (devices if on_cpu else 1)
    if device_bytes > free:
        raise UserError(
            f"the {cfg.policy.value} state and a prompt in prefill need {gib(device_bytes)} of "
            f"device memory, {gib(free)} are free; {_smaller_device(cfg, needed, batch)}"
        )
    together = devices * needed.host_bytes + (device_bytes if on_cpu else 0)
    free = free_host_bytes()
    if together > free:
        limit = f", or raise {PINNED_LIMIT_VARIABLE}" if jax.default_backend() == "gpu" else ""
        raise UserError(
            f"the host pools ({HOST_KIND}) and what shares their memory need {gib(together)}, "
            f"{gib(free)} are free; shorten the texts (room for {cfg.capacity:,} tokens each), "
            f"lower --batch (now {batch}) or --host-memory{limit}"
        )
    return needed
