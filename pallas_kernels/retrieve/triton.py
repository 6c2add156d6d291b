"""Retrieval on a GPU: each program reads whole host records and writes them to their slots.

The lists of all requests are walked as one, without the entries that do not count: the programs
take turns at `records` entries each, so few entries cost little however long the lists are, and one
request with many keeps no program waiting. Each program adds up the counts for itself, and finds
the request of an entry by comparing with the sums. Moves have programs of their own, the last ones.

The link is limited by reads per second, and each waits long: many programs are in flight.
Traffic: every fetched record crosses the link once, and is written to device memory once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.memory_space import as_device
from pallas_kernels.common.triton_rows import (
    Tuning,
    default_tuning,
    load_ids,
    load_records,
    store_records,
)
from pallas_kernels.retrieve.types import Fetches, Moves


def retrieve(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    fetches: Fetches,
    moves: Moves | None = None,
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Int[Array, "S W"]:
    """See `api.retrieve`. `interpret` runs the kernel as plain XLA operations."""
    tuning = tuning or default_tuning(slots.shape[1])
    walkers = min(tuning.programs, pl.cdiv(fetches.rows.size, tuning.records))
    movers = 0 if moves is None else pl.cdiv(moves.sources.size, tuning.records)
    if walkers + movers == 0:
        return slots
    # A list without entries has no program, but its arrays are operands, which cannot be empty.
    lists = [*fetches, *(moves or ())]
    lists = [ids if ids.size else jnp.full((1,) * ids.ndim, NO_SLOT, jnp.int32) for ids in lists]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_retrieve_kernel, walkers=walkers, tuning=tuning),
        grid=(walkers + movers,),
        in_specs=[whole] * (2 + len(lists)),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(slots.shape, slots.dtype),
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="retrieve",
    )
    return call(as_device(host) if interpret else host, slots, *lists)


def _retrieve_kernel(
    host_ref: jax.Ref,
    _: jax.Ref,
    rows_ref: jax.Ref,
    targets_ref: jax.Ref,
    counts_ref: jax.Ref,
    *refs: jax.Ref,
    walkers: int,
    tuning: Tuning,
) -> None:
    *moves, slots_ref = refs
    program = pl.program_id(0)
    lists = rows_ref, targets_ref, counts_ref

    @pl.when(program < walkers)
    def _fetch() -> None:
        _walk(host_ref, lists, slots_ref, program, walkers, tuning.records)

    if not moves:
        return

    @pl.when(program >= walkers)
    def _move() -> None:
        sources_ref, targets_ref = moves
        entry = (program - walkers) * tuning.records + jnp.arange(tuning.records, dtype=jnp.int32)
        inside = entry < sources_ref.shape[0]
        sources, targets = (load_ids(ref, (entry,), inside) for ref in (sources_ref, targets_ref))
        records = load_records(slots_ref, sources)
        store_records(slots_ref, targets, records, sources != NO_SLOT)


def _walk(
    host_ref: jax.Ref,
    lists: tuple[jax.Ref, jax.Ref, jax.Ref],
    slots_ref: jax.Ref,
    program: jax.Array,
    walkers: int,
    records: int,
) -> None:
    """Fetch every `walkers`-th run of `records` entries, counted over all requests."""
    rows_ref, targets_ref, counts_ref = lists
    requests, entries = rows_ref.shape
    every = jnp.arange(pl.next_power_of_2(requests), dtype=jnp.int32)
    counts = plgpu.load(counts_ref.at[jnp.minimum(every, requests - 1)])
    counts = jnp.where(every < requests, jnp.clip(counts, 0, entries), 0)
    end, total = jnp.cumsum(counts, dtype=jnp.int32), jnp.sum(counts)
    runs = (total + records - 1) // records

    def fetch(turn: jax.Array, _: None) -> None:
        entry = (turn * walkers + program) * records + jnp.arange(records, dtype=jnp.int32)
        over = end[None] <= entry[:, None]
        request = jnp.sum(over, axis=1, dtype=jnp.int32)
        place = entry - jnp.max(jnp.where(over, end[None], 0), axis=1)
        at = request, place
        rows, targets = (load_ids(ref, at, entry < total) for ref in (rows_ref, targets_ref))
        store_records(slots_ref, targets, load_records(host_ref, rows), rows != NO_SLOT)

    lax.fori_loop(0, (runs - program + walkers - 1) // walkers, fetch, None)
