"""Backup on a TPU: one kernel sends device records to all host pools in place, a DMA for each.

The entries of the lists are walked once; of those that name a row, the record of every pool is on
its way before the next entry. Records of one size share a semaphore, so that waiting for one of
them means the same whichever it is.

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

from pallas_kernels.common.ids import NO_SLOT, masked
from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.memory_space import as_device, as_host, is_host
from pallas_kernels.common.record_layout import lanes_view, pool_of, words_of_record
from pallas_kernels.common.tpu_records import CHUNK, chunks, copy_record, poison, wait_all


def backup(
    hosts: Sequence[Int[Array, "_ lines 128"]],
    slots: Sequence[Int[Array, "_ lines 128"]],
    rows: Int[Array, " n"],
    sources: Int[Array, "pools n"],
) -> tuple[Int[Array, "_ lines 128"], ...]:
    """See `api.backup`. Slot arrays that are the same object are one operand."""
    if not sources.size:
        return tuple(hosts)
    arrays = list({id(array): array for array in slots}.values())
    slots_of = tuple(next(i for i, one in enumerate(arrays) if one is array) for array in slots)
    sizes = sorted({words_of_record(host) for host in hosts})
    lists = _chunked(rows, sources)
    ids = pl.BlockSpec((1, *lists.shape[1:]), lambda turn: (turn, 0, 0), memory_space=pltpu.SMEM)
    whole, views = pl.BlockSpec(memory_space=pl.ANY), [lanes_view(as_device(h)) for h in hosts]
    pools = [pl.BlockSpec(memory_space=pl.HOST if is_host(h) else pl.ANY) for h in hosts]
    space = lambda host: pl.HOST if is_host(host) and not tpu_interpret() else jax.ShapeDtypeStruct
    first = 1 + len(sizes) + len(arrays)
    written = pl.pallas_call(
        functools.partial(
            _backup_kernel,
            slots_of=slots_of,
            size_of=tuple(sizes.index(words_of_record(host)) for host in hosts),
        ),
        grid=(lists.shape[0],),
        in_specs=[ids, *[whole] * (first - 1), *pools],
        out_specs=pools,
        out_shape=[space(host)(view.shape, view.dtype) for host, view in zip(hosts, views)],
        input_output_aliases={first + pool: pool for pool in range(len(hosts))},
        scratch_shapes=[pltpu.SMEM((len(sizes),), jnp.int32)]
        + [pltpu.SemaphoreType.DMA] * len(sizes),
        interpret=tpu_interpret(),
        name="backup",
    )(lists, *(poison(words) for words in sizes), *(lanes_view(array) for array in arrays), *views)
    back = lambda new, old: as_host(pool_of(as_device(new), old)) if is_host(old) else pool_of(new, old)
    return tuple(map(back, written, hosts))


def _chunked(rows: Int[Array, " n"], sources: Int[Array, "pools n"]) -> Int[Array, "_ lists size"]:
    """Rows, then the sources of every pool, in chunks: those of a chunk together."""
    ids = jnp.concatenate([rows[None], masked(sources, rows[None] != NO_SLOT)])
    size = min(CHUNK, ids.shape[1])
    return chunks(ids, size).reshape(ids.shape[0], -1, size).transpose(1, 0, 2)


def _backup_kernel(
    ids_ref: jax.Ref,
    *refs: jax.Ref,
    slots_of: tuple[int, ...],
    size_of: tuple[int, ...],
) -> None:
    """Operands: ids, a record that does not exist of each size, slots, hosts; results; scratch."""
    sizes, pools = len(set(size_of)), len(slots_of)
    poisons, *rest = refs[:sizes], *refs[sizes:]
    slots, hosts = rest[: max(slots_of) + 1], rest[max(slots_of) + 1 + pools :][:pools]
    started_ref, *semaphores = rest[max(slots_of) + 1 + 2 * pools :]
    turn = pl.program_id(0)

    @pl.when(turn == 0)
    def _begin() -> None:
        for size in range(sizes):
            started_ref[size] = 0

    def copy(entry: jax.Array, started: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        counts, row = list(started), ids_ref[0, 0, entry]
        for pool, (array, size) in enumerate(zip(slots_of, size_of, strict=True)):
            counts[size] = copy_record(
                slots[array], hosts[pool], poisons[size], semaphores[size],
                ids_ref[0, 1 + pool, entry], row, counts[size],
            )
        return tuple(counts)

    def copies(entry: jax.Array, started: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        named = ids_ref[0, 0, entry] != NO_SLOT
        return lax.cond(named, functools.partial(copy, entry), lambda counts: counts, started)

    started = tuple(started_ref[size] for size in range(sizes))
    for size, count in enumerate(lax.fori_loop(0, ids_ref.shape[2], copies, started)):
        started_ref[size] = count

    @pl.when(turn == pl.num_programs(0) - 1)
    def _end() -> None:
        for size in range(sizes):
            wait_all(poisons[size], semaphores[size], started_ref[size])
