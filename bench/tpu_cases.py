"""Calls of TPU kernels at production sizes, as shapes, and what each has to move.

The sizes are those of the GPU benchmarks (`bench.ops`); pools lie as they do on a TPU
(`pallas_kernels.common.record_layout`), four layers of GLM-5.3 to a record.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from bench.ops import backup as backups
from bench.ops import index_scores as scores
from bench.ops import retrieve as retrievals
from bench.ops import sparse_attention as attention
from bench.ops import top_k as selections
from bench.roofline import Traffic
from bench.shard_weights import abstract_leaf
from pallas_kernels.backup.api import backup
from pallas_kernels.common.record_layout import LANES, TILES
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.types import ScaledKeys
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.top_k.api import top_k

LAYERS = 4
"""Of a record."""

SLOT_LIMIT = 1 << 17
"""Slots of a hot pool: what a 16 GB chip has room for, 4 KB each, beside anything else."""


class TpuCase(NamedTuple):
    """A call, by shapes.

    Attributes:
        function: to be jitted; its first operand is donated if `donate`.
        operands: a pytree of shapes for each; fields named `host` are in host memory.
        traffic: what it moves by design, padding and repeated reads included.
        copies: DMAs that the kernel starts itself, beside those of the pipeline of blocks.
        donate: whether the first operand is updated in place.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    traffic: Traffic
    copies: int = 0
    donate: bool = False


class HostPool(NamedTuple):
    """A pool of records in host memory, by its place in a pytree."""

    host: Array


def _bytes(*arrays: Array) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _record_shape(row_words: int) -> tuple[int, ...]:
    return TILES.shape(TILES.record_words(LAYERS, row_words))


def scored(case: scores.IndexScores) -> TpuCase:
    """Keys and scales once for up to eight queries, scores once."""
    heads = (case.requests, case.queries, case.heads)
    positions = (case.requests, case.positions)
    query = abstract_leaf((*heads, case.width), jnp.bfloat16)
    numbers: DTypeLike = jnp.float8_e4m3fn if case.keys == "fp8" else jnp.bfloat16
    keys: Any = abstract_leaf((*positions, case.width), numbers)
    read = _bytes(keys)
    if case.keys == "fp8":
        scales = abstract_leaf(positions, jnp.float32)
        keys, read = ScaledKeys(keys, scales), read + 3 * _bytes(scales)
    result = WORD_BYTES * case.requests * case.queries * case.positions
    return TpuCase(
        partial(index_scores, backend="tpu"),
        (query, abstract_leaf(heads, jnp.float32), keys, abstract_leaf(heads[:2], jnp.int32)),
        Traffic(
            hbm_bytes=read + _bytes(query) + result,
            flops=2 * result // WORD_BYTES * case.heads * case.width,
        ),
    )


def selected(case: selections.TopK) -> TpuCase:
    """Scores once, positions once; a copy for each row."""
    rows = abstract_leaf((case.requests, 1, case.positions), jnp.float32)
    result = WORD_BYTES * case.requests * case.k
    return TpuCase(
        partial(top_k, k=case.k, backend="tpu"),
        (rows,),
        Traffic(hbm_bytes=_bytes(rows) + result),
        copies=case.requests,
    )


def attended(case: attention.SparseAttention) -> TpuCase:
    """The lines of every row of every query; queries and values as rows and as planes."""
    words = case.row_bytes // WORD_BYTES
    selected = case.requests * case.queries * case.k
    slots = min(case.requests * case.slots, SLOT_LIMIT)
    query = abstract_leaf((case.requests, case.queries, case.heads, case.width), jnp.bfloat16)
    location = abstract_leaf((case.requests, case.queries, case.k), jnp.int32)
    options = case.options | {"offset": (LAYERS - 1) * TILES.row_stride(words)}
    lines = WORD_BYTES * selected * TILES.row_stride(words)
    return TpuCase(
        partial(sparse_attention, backend="tpu", **options),
        (query, abstract_leaf((slots, *_record_shape(words)), jnp.int32), location),
        Traffic(
            hbm_bytes=lines + 3 * _bytes(location) + 6 * _bytes(query),
            flops=case.traffic().flops,
        ),
        copies=selected,
    )


def retrieved(case: retrievals.Retrieve) -> TpuCase:
    """Whole records over the link, into slots in place."""
    sizes = case.sizes
    record = TILES.shape(TILES.record_words(1, sizes.words))
    entries = sizes.entries or sizes.records // sizes.requests
    lists = abstract_leaf((sizes.requests, entries), jnp.int32)
    moved = sizes.records * LANES * WORD_BYTES * record[0]

    def run(slots: jax.Array, pool: HostPool, fetches: Fetches) -> jax.Array:
        return retrieve(pool.host, slots, fetches, backend="tpu")

    return TpuCase(
        run,
        (
            abstract_leaf((sizes.slots, *record), jnp.int32),
            HostPool(abstract_leaf((_pool_records(sizes.pool_bytes, record), *record), jnp.int32)),
            Fetches(lists, lists, abstract_leaf((sizes.requests,), jnp.int32)),
        ),
        Traffic(hbm_bytes=moved, link_bytes=moved),
        copies=sizes.records,
        donate=True,
    )


def backed_up(case: backups.Backup) -> TpuCase:
    """Whole records over the link, into all pools in place."""
    sizes = case.sizes
    record = TILES.shape(TILES.record_words(1, sizes.words))
    pool = HostPool(abstract_leaf((_pool_records(sizes.pool_bytes, record), *record), jnp.int32))
    slots = abstract_leaf((sizes.slots, *record), jnp.int32)
    moved = sizes.pools * sizes.records * LANES * WORD_BYTES * record[0]

    def run(
        pools: tuple[HostPool, ...], slots: jax.Array, rows: jax.Array, sources: jax.Array
    ) -> tuple[jax.Array, ...]:
        hosts = tuple(pool.host for pool in pools)
        return backup(hosts, (slots,) * len(hosts), rows, sources, backend="tpu")

    ids = (sizes.pools, sizes.records)
    return TpuCase(
        run,
        (
            (pool,) * sizes.pools,
            slots,
            abstract_leaf(ids[1:], jnp.int32),
            abstract_leaf(ids, jnp.int32),
        ),
        Traffic(hbm_bytes=moved, link_bytes=moved),
        copies=sizes.pools * sizes.records,
        donate=True,
    )


def _pool_records(pool_bytes: int, record: tuple[int, ...]) -> int:
    return pool_bytes // (WORD_BYTES * record[0] * record[1])


CASES: dict[str, dict[str, TpuCase]] = {
    "retrieve": {
        name: retrieved(retrievals.CASES[name])
        for name in ("2688B_512", "2688B_16MB", "4608B_16MB", "2688B_512_of_2M")
    },
    "backup": {
        name: backed_up(backups.CASES[name]) for name in ("2688B_512", "2688B_16MB", "4608B_16MB")
    },
    "index_scores": {name: scored(case) for name, case in scores.CASES.items()},
    "top_k": {name: selected(case) for name, case in selections.CASES.items()},
    "sparse_attention": {
        name: attended(case)
        for name, case in attention.CASES.items()
        if "overlap" not in name  # the shapes are those of the case without
    },
}
"""Cases of each operation that has a TPU kernel."""
