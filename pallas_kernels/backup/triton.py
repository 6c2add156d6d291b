"""Backup on a GPU: one kernel reads device records and writes them to all host pools in place.

A program is a run of `records` entries of one pool. It knows its pool by its program id, and takes
one of as many branches as there are pools: they differ in one address only, the records are loaded
before. Entries that do nothing cost no traffic: of a step's lists, of which a few hundred entries
live, there are few; of a prefill's, most live.

With jax before 0.11.2 a kernel writes one pool: see launch.SEVERAL_RESULTS.

Traffic: every backed up record is read from device memory once, and crosses the link once.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.backup.launch import annotated, launched, shared_operands
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.memory_space import as_device, as_host, is_host
from pallas_kernels.common.triton_rows import (
    Tuning,
    default_tuning,
    load_ids,
    load_records,
    store_records,
)


def backup(
    hosts: Sequence[Int[Array, "_ _"]],
    slots: Sequence[Int[Array, "_ _"]],
    rows: Int[Array, " n"],
    sources: Int[Array, "pools n"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "_ _"], ...]:
    """See `api.backup`. `interpret` runs the kernel as plain XLA operations."""
    run = functools.partial(_launch, rows, tuning=tuning, interpret=interpret)
    return launched(run, hosts, slots, sources)


def _launch(
    rows: Int[Array, " n"],
    hosts: Sequence[Int[Array, "_ _"]],
    slots: Sequence[Int[Array, "_ _"]],
    sources: Int[Array, "pools n"],
    *,
    tuning: Tuning | None,
    interpret: bool,
) -> tuple[Int[Array, "_ _"], ...]:
    """One kernel for all of the pools."""
    tuning = tuning or default_tuning(max(host.shape[1] for host in hosts))
    arrays, slots_of = shared_operands(slots)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    first = 2 + len(arrays)
    call = pl.pallas_call(
        functools.partial(_backup_kernel, slots_of=slots_of, records=tuning.records),
        grid=(pl.cdiv(rows.shape[0], tuning.records), len(hosts)),
        in_specs=[whole] * (first + len(hosts)),
        out_specs=[whole] * len(hosts),
        out_shape=[jax.ShapeDtypeStruct(host.shape, host.dtype) for host in hosts],
        input_output_aliases={first + pool: pool for pool in range(len(hosts))},
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="backup",
    )
    written = call(rows, sources, *arrays, *(as_device(h) if interpret else h for h in hosts))
    each = zip(written, hosts, strict=True)
    if interpret:
        return tuple(as_host(new) if is_host(old) else new for new, old in each)
    return tuple(annotated(new, old) for new, old in each)


def _backup_kernel(
    rows_ref: jax.Ref,
    sources_ref: jax.Ref,
    *refs: jax.Ref,
    slots_of: tuple[int, ...],
    records: int,
) -> None:
    hosts = refs[-len(slots_of) :]
    pool = pl.program_id(1)
    entry = pl.program_id(0) * records + jnp.arange(records, dtype=jnp.int32)
    inside = entry < rows_ref.shape[0]
    rows = load_ids(rows_ref, (entry,), inside)
    sources = load_ids(sources_ref, (jnp.full_like(entry, pool), entry), inside)
    for number in sorted(set(slots_of)):
        members = [one for one, array in enumerate(slots_of) if array == number]

        @pl.when(functools.reduce(jnp.logical_or, [pool == member for member in members]))
        def _copy(number: int = number, members: list[int] = members) -> None:
            loaded = load_records(refs[number], sources)
            for member in members:
                write = functools.partial(store_records, hosts[member], rows, loaded)
                pl.when(pool == member)(functools.partial(write, sources != NO_SLOT))
