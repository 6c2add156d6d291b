"""Backup on a TPU: one kernel sends device records to all host pools in place, a DMA for each.

The entries of the lists are walked once; of those that name a row, the record of every pool is on
its way before the next entry. Records of one size share a semaphore, so that waiting for one of
them means the same whichever it is.

With jax before 0.11.2 a kernel writes one pool: see launch.SEVERAL_RESULTS.

Traffic: every backed up record is read from device memory once, and crosses the link once.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.backup.launch import annotated, launched, shared_operands
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.memory_space import as_device, is_host
from pallas_kernels.common.record_layout import lanes_view, pool_of, words_of_record
from pallas_kernels.common.tpu_records import CHUNK, chunks, copy_record, in_hbm, poison, wait_all


def backup(
    hosts: Sequence[Int[Array, "_ _ 128"]],
    slots: Sequence[Int[Array, "_ _ 128"]],
    rows: Int[Array, " n"],
    sources: Int[Array, "pools n"],
) -> tuple[Int[Array, "_ _ 128"], ...]:
    """See `api.backup`."""
    return launched(functools.partial(_launch, rows), hosts, slots, sources)


def _launch(
    rows: Int[Array, " n"],
    hosts: Sequence[Int[Array, "_ _ 128"]],
    slots: Sequence[Int[Array, "_ _ 128"]],
    sources: Int[Array, "pools n"],
) -> tuple[Int[Array, "_ _ 128"], ...]:
    """One kernel for all of the pools."""
    arrays, slots_of = shared_operands(slots)
    sizes = sorted({words_of_record(host) for host in hosts})
    lists = _chunked(rows, sources)
    ids = pl.BlockSpec((1, *lists.shape[1:]), lambda turn: (turn, 0, 0), memory_space=pltpu.SMEM)
    device = [pl.BlockSpec(memory_space=pltpu.HBM)] * (len(sizes) + len(arrays))
    pools = [pl.BlockSpec(memory_space=pl.HOST if is_host(host) else pltpu.HBM) for host in hosts]
    views = [lanes_view(as_device(host)) for host in hosts]
    call = pl.pallas_call(
        functools.partial(
            _backup_kernel,
            slots_of=slots_of,
            size_of=tuple(sizes.index(words_of_record(host)) for host in hosts),
        ),
        grid=(lists.shape[0],),
        in_specs=[ids, *device, *pools],
        out_specs=pools,
        out_shape=[jax.ShapeDtypeStruct(view.shape, view.dtype) for view in views],
        input_output_aliases={1 + len(device) + pool: pool for pool in range(len(pools))},
        scratch_shapes=[
            pltpu.SMEM((len(sizes),), jnp.int32),
            *[pltpu.SemaphoreType.DMA] * len(sizes),
        ],
        interpret=tpu_interpret(),
        name="backup",
    )
    written = call(
        lists, *map(poison, sizes), *(in_hbm(lanes_view(array)) for array in arrays), *views
    )
    each = zip(written, hosts, strict=True)
    return tuple(annotated(pool_of(new, host), host) for new, host in each)


def _chunked(rows: Int[Array, " n"], sources: Int[Array, "pools n"]) -> Int[Array, "_ lists size"]:
    """Rows, then the sources of every pool, in chunks: those of a chunk together."""
    ids = jnp.concatenate([rows[None], sources])
    size = min(CHUNK, ids.shape[1])
    return chunks(ids, size).reshape(ids.shape[0], -1, size).transpose(1, 0, 2)


def _backup_kernel(
    ids_ref: jax.Ref, *refs: jax.Ref, slots_of: tuple[int, ...], size_of: tuple[int, ...]
) -> None:
    """Operands: ids, a record that is not there of each size, slots, hosts; results; scratch."""
    sizes, arrays, pools = max(size_of) + 1, max(slots_of) + 1, len(slots_of)
    poisons, slots = refs[:sizes], refs[sizes : sizes + arrays]
    hosts, (started_ref, *semaphores) = refs[-sizes - 1 - pools : -sizes - 1], refs[-sizes - 1 :]

    @pl.when(pl.program_id(0) == 0)
    def _begin() -> None:
        for size in range(sizes):
            started_ref[size] = 0

    def copy(entry: jax.Array, _: None) -> None:
        row = ids_ref[0, 0, entry]

        @pl.when(row != NO_SLOT)
        def _each_pool() -> None:
            for pool, (array, size) in enumerate(zip(slots_of, size_of, strict=True)):
                refs = slots[array], hosts[pool], poisons[size], semaphores[size]
                source = ids_ref[0, 1 + pool, entry]
                started_ref[size] = copy_record(*refs, source, row, started_ref[size])

    lax.fori_loop(0, ids_ref.shape[2], copy, None)

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _end() -> None:
        for size in range(sizes):
            wait_all(poisons[size], semaphores[size], started_ref[size])
