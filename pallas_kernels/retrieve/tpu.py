"""Retrieval on a TPU: a DMA of one contiguous run for every record, many of them in flight.

The lists of all requests are cut into chunks; those with entries that count are walked, the others
are not even read. Moves are chunks of their own behind them, which read the slots instead of the
host. The chunk that is worked on lies in scalar memory, and the next one comes meanwhile.

Traffic: every fetched record crosses the link once, and is written to device memory once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.common.ids import packed
from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.memory_space import as_device, is_host
from pallas_kernels.common.record_layout import lanes_view, pool_of, words_of_record
from pallas_kernels.common.tpu_records import CHUNK, chunks, copy_record, in_hbm, poison, wait_all
from pallas_kernels.retrieve.types import Fetches, Moves


def retrieve(
    host: Int[Array, "N lines 128"],
    slots: Int[Array, "S lines 128"],
    fetches: Fetches,
    moves: Moves | None = None,
) -> Int[Array, "S lines 128"]:
    """See `api.retrieve`."""
    lists = _chunked(fetches, moves)
    if not lists.rows.size:
        return slots
    count = jnp.sum(lists.counts > 0, dtype=jnp.int32)
    every = jnp.arange(lists.counts.shape[0], dtype=jnp.int32)
    order = packed(lists.counts[None] > 0, every[None])[0]
    ids = pl.BlockSpec(
        (1, 1, lists.rows.shape[-1]),
        lambda turn, order, counts: (jnp.maximum(order[turn], 0), 0, 0),
        memory_space=pltpu.SMEM,
    )
    whole = pl.BlockSpec(memory_space=pltpu.HBM)
    pool = pl.BlockSpec(memory_space=pl.HOST if is_host(host) else pltpu.HBM)
    view = in_hbm(lanes_view(slots))
    call = pl.pallas_call(
        functools.partial(_retrieve_kernel, first_move=lists.first_move),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(count, 1),),
            in_specs=[ids, ids, pool, whole, whole],
            out_specs=whole,
            scratch_shapes=[pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA],
        ),
        out_shape=pltpu.HBM(view.shape, view.dtype),
        input_output_aliases={6: 0},
        interpret=tpu_interpret(),
        name="retrieve",
    )
    record = poison(words_of_record(slots))
    filled = call(
        order, lists.counts, lists.rows, lists.targets, lanes_view(as_device(host)), record, view
    )
    return pool_of(filled, slots)


class _Lists(NamedTuple):
    """Fetches, then moves, in chunks.

    Attributes:
        rows: int32 sources of each chunk: rows of the host pool, or slots.
        targets: int32 slots.
        counts: int32 entries of each chunk that count, the first ones.
        first_move: number of the first chunk of moves.
    """

    rows: Int[Array, "chunks 1 size"]
    targets: Int[Array, "chunks 1 size"]
    counts: Int[Array, " chunks"]
    first_move: int


def _chunked(fetches: Fetches, moves: Moves | None) -> _Lists:
    lists = [(fetches.rows, fetches.targets, fetches.counts)]
    if moves is not None:
        count = jnp.full(1, moves.sources.shape[0], jnp.int32)
        lists.append((moves.sources[None], moves.targets[None], count))
    size = min(CHUNK, max(1, *(ids.shape[1] for ids, _, _ in lists)))
    counts = []
    for ids, _, count in lists:
        first = size * jnp.arange(pl.cdiv(ids.shape[1], size), dtype=jnp.int32)
        counts.append(jnp.clip(count[:, None] - first[None], 0, size).reshape(-1))
    rows, targets = (
        jnp.concatenate([chunks(each[side], size) for each in lists])[:, None] for side in (0, 1)
    )
    return _Lists(rows, targets, jnp.concatenate(counts), counts[0].shape[0])


def _retrieve_kernel(
    order_ref: jax.Ref,
    counts_ref: jax.Ref,
    rows_ref: jax.Ref,
    targets_ref: jax.Ref,
    host_ref: jax.Ref,
    poison_ref: jax.Ref,
    _: jax.Ref,
    slots_ref: jax.Ref,
    started_ref: jax.Ref,
    semaphore: jax.Ref,
    *,
    first_move: int,
) -> None:
    turn = pl.program_id(0)
    chunk = jnp.maximum(order_ref[turn], 0)

    @pl.when(turn == 0)
    def _begin() -> None:
        started_ref[0] = 0

    def copy_from(pool_ref: jax.Ref) -> None:
        def copy(entry: jax.Array, started: jax.Array) -> jax.Array:
            ids = rows_ref[0, 0, entry], targets_ref[0, 0, entry]
            return copy_record(pool_ref, slots_ref, poison_ref, semaphore, *ids, started)

        started_ref[0] = lax.fori_loop(0, counts_ref[chunk], copy, started_ref[0])

    pl.when(chunk < first_move)(functools.partial(copy_from, host_ref))
    pl.when(chunk >= first_move)(functools.partial(copy_from, slots_ref))

    @pl.when(turn == pl.num_programs(0) - 1)
    def _end() -> None:
        wait_all(poison_ref, semaphore, started_ref[0])
