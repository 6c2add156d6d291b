"""Sparse attention on a TPU: rows are gathered from HBM slots by DMA while others are multiplied.

One query's selection is cut into blocks of rows, and the programs of the grid, `[query, block]`, go
through them in order. A program first starts the copies for the next one: a row each, from its slot
in HBM to its place in one of two buffers in VMEM, all on one semaphore. Then it waits for its own,
views the words as numbers (`tpu_rows.py`) and does one step of the online softmax: logits of all
heads by one product with float32 accumulation, maximum and sum in float32, values by another.

Slots are addressed by ids in scalar memory, a block of the program and one of the next; how many of
them are valid is known ahead (scalar prefetch), so blocks without a row are passed over. An entry
without a row is not read: its place is zeroed, and its logits are -inf.

Traffic: a record of a pool is whole tiles on a TPU (`common.record_layout`), and a row of it whole
lines of 128 words next to each other: two for GLM's fp8 rows, 1,024 bytes for 656, and three for
its bfloat16 rows, 1,536 for 1,152. So `R T K` times that, besides queries and values. A row that
several queries of a request select is read for each of them. What bounds the kernel is rather how
many copies the scalar core starts: one per row. Records that are words, `[S, W]`, lie in tiles of
eight slots; a copy of a row of those is a run of 512 bytes in each tile.

Tiles: 512 rows, two buffers of 512 x 3 lines (1.5 MB), products of [64, 768] with [768, 512].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.record_layout import LANES, lines_view, words_of_record
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.sparse_attention.tpu_rows import (
    Part,
    aligned,
    decoded,
    from_planes,
    parts,
    refusal,
    row_words,
    to_planes,
)

Slice = Any
"""A slice of a reference, which has another type."""

Copy = Any
"""What `make_async_copy` returns, whose type has no public name."""

TURN = 16
"""Copies that a turn of a loop starts; blocks are whole turns, and so whole tiles of bfloat16."""

LEAST = float(jnp.finfo(jnp.float32).min)
"""Where the running maximum begins: nothing finite is less, and it can be subtracted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut.

    Attributes:
        block: rows of a program at most; a multiple of 128.
    """

    block: int = 512


class Plan(NamedTuple):
    """What a program knows at compile time.

    Attributes:
        record: lines of 128 words of a record; 0 of records that are words.
        first: the first line of a record that is copied; of words, the first word.
        shape: what is copied of a record, in lines and words.
        start: the row's first word among them.
        row_format: of the row.
        parts: what it consists of.
        value_parts: what of that is its value.
        scale: factor of the logits.
    """

    record: int
    first: int
    shape: tuple[int, int]
    start: int
    row_format: DTypeLike | ScaledRow
    parts: list[Part]
    value_parts: list[Part]
    scale: float


def supports(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S *W"],
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    del slots, offset, value_width
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries of {query.dtype}"
    return refusal(query.shape[-1], row_format)


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S *W"],
    location: Int[Array, "R T K"],
    sinks: Float[Array, " H"] | None = None,
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """See `api.sparse_attention`."""
    tuning = tuning or Tuning()
    requests, count, heads, width = query.shape
    plan = _plan(slots, width, offset, row_format, value_width, scale)
    block = min(tuning.block, -(-location.shape[2] // TURN) * TURN)
    missing = -location.shape[2] % block
    ids = jnp.pad(location, ((0, 0), (0, 0), (0, missing)), constant_values=NO_SLOT)
    sinks = jnp.full(heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    values, lse = _attended(
        to_planes(query.reshape(requests * count, heads, width), plan.parts),
        lines_view(slots) if plan.record else slots,
        ids.reshape(-1, 1, block),
        sinks[:, None],
        plan,
    )
    values = from_planes(values, plan.value_parts)[..., :value_width]
    shape = requests, count, heads
    return values.reshape(*shape, value_width), lse.reshape(shape)


def _attended(
    planes: Float[Array, "queries H lanes"],
    pool: Int[Array, "..."],
    ids: Int[Array, "blocks 1 block"],
    sinks: Float[Array, "H 1"],
    plan: Plan,
) -> tuple[Float[Array, "queries H values"], Float[Array, "queries 1 H"]]:
    """Values as planes, and log-sum-exp, of queries as planes; `ids` are cut into blocks."""
    queries, heads, lanes = planes.shape
    total, _, block = ids.shape
    blocks = total // queries
    live = (ids >= 0).sum(axis=(1, 2), dtype=jnp.int32)
    value_lanes = sum(part.per_word * part.lanes for part in plan.value_parts)
    of_ids = lambda space, ahead: pl.BlockSpec(
        (None, 1, block),
        lambda q, b, _: (jnp.minimum(q * blocks + b + ahead, total - 1), 0, 0),
        memory_space=space,
    )
    of_query = lambda *sizes: pl.BlockSpec((None, *sizes), lambda q, b, _: (q, 0, 0))
    call = pl.pallas_call(
        functools.partial(_attention_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(queries, blocks),
            in_specs=[
                of_ids(pltpu.SMEM, 0),
                of_ids(pltpu.SMEM, 1),
                of_ids(pltpu.VMEM, 0),
                pl.BlockSpec((heads, 1), lambda q, b, _: (0, 0)),
                of_query(heads, lanes),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=(of_query(heads, value_lanes), of_query(1, heads)),
            scratch_shapes=_scratch(block, heads, value_lanes, plan),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((queries, heads, value_lanes), planes.dtype),
            jax.ShapeDtypeStruct((queries, 1, heads), jnp.float32),
        ),
        # Slots are in bounds by contract, and to check each of them takes three times as long as
        # to start its copy.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), disable_bounds_checks=True
        ),
        cost_estimate=_cost(ids.size, planes, value_lanes, plan),
        interpret=tpu_interpret(),
        name="sparse_attention",
    )
    return call(live, ids, ids, ids, sinks, planes, pool)


def _scratch(block: int, heads: int, value_lanes: int, plan: Plan) -> list[Any]:
    """Two buffers of rows; maximum, sum and values so far; a semaphore for each buffer."""
    lines, words = plan.shape
    return [
        pltpu.VMEM((2, lines, block, words), jnp.int32),
        pltpu.VMEM((heads, 1), jnp.float32),
        pltpu.VMEM((heads, 1), jnp.float32),
        pltpu.VMEM((heads, value_lanes), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def _plan(
    slots: Int[Array, "S *W"],
    width: int,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
) -> Plan:
    """Copies are whole lines of words, or whole records that are not whole lines."""
    record = words_of_record(slots)
    first, last = 0, record
    if record % LANES == 0:
        first = offset // LANES * LANES
        last = -(-(offset + row_words(width, row_format)) // LANES) * LANES
    in_lines = slots.ndim == 3
    lines = (last - first) // LANES
    whole = parts(width, row_format)
    values = [part.value_part(value_width) for part in whole]
    return Plan(
        record=record // LANES if in_lines else 0,
        first=first // LANES if in_lines else first,
        shape=(lines, LANES) if in_lines else (1, last - first),
        start=offset - first,
        row_format=row_format,
        parts=whole,
        value_parts=[part for part in values if part.count],
        scale=scale,
    )


def _cost(
    rows: int, planes: Float[Array, "queries H lanes"], value_lanes: int, plan: Plan
) -> pl.CostEstimate:
    """What XLA should know of the kernel, to place other work beside it."""
    queries, heads, lanes = planes.shape
    lines, words = plan.shape
    results = queries * heads * (lanes + value_lanes) * planes.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * rows * heads * (lanes + value_lanes),
        bytes_accessed=4 * rows * lines * words + results,
        transcendentals=rows * heads,
    )


def _attention_kernel(
    live_ref: jax.Ref,  # [queries * blocks], in SMEM
    ids_ref: jax.Ref,  # [1, block], in SMEM
    next_ids_ref: jax.Ref,  # [1, block], in SMEM
    lane_ids_ref: jax.Ref,  # [1, block]
    sinks_ref: jax.Ref,  # [H, 1]
    query_ref: jax.Ref,  # [H, planes]
    slots_ref: jax.Ref,  # [S, W], or [S * lines, 1, 128], in HBM
    values_ref: jax.Ref,  # [H, value planes]
    lse_ref: jax.Ref,  # [1, H]
    rows_ref: jax.Ref,  # [2, lines, block, words of a line]
    peak_ref: jax.Ref,  # [H, 1]
    total_ref: jax.Ref,  # [H, 1]
    sum_ref: jax.Ref,  # [H, value planes]
    semaphores: jax.Ref,  # [2]
    *,
    plan: Plan,
) -> None:
    block, blocks = pl.program_id(1), pl.num_programs(1)
    step = pl.program_id(0) * blocks + block
    steps = pl.num_programs(0) * blocks
    fetch = functools.partial(_fetch, live_ref, slots_ref, rows_ref, semaphores, plan)

    @pl.when(step == 0)
    def _first() -> None:
        fetch(ids_ref, step)

    @pl.when(step + 1 < steps)
    def _next() -> None:
        fetch(next_ids_ref, step + 1)

    @pl.when(block == 0)
    def _begin() -> None:
        sinks = sinks_ref[...]
        peak_ref[...] = jnp.maximum(sinks, LEAST)
        total_ref[...] = jnp.where(sinks > LEAST, 1.0, 0.0)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @pl.when(live_ref[step] > 0)
    def _attend() -> None:
        buffer = rows_ref.at[step % 2]
        _wait(live_ref[step], buffer, semaphores.at[step % 2])
        lines = [buffer[line] for line in range(plan.shape[0])]
        words = aligned(jnp.concatenate(lines, axis=1), plan.start)
        keys = decoded(words, plan.parts, plan.row_format, query_ref.dtype)
        logits = plan.scale * _dot(query_ref[...], keys, 1)
        logits = jnp.where(lane_ids_ref[...] >= 0, logits, -jnp.inf)
        weights, factor = _weights(logits, peak_ref, total_ref)
        attended = _dot(weights.astype(keys.dtype), _values(keys, plan), 0)
        sum_ref[...] = sum_ref[...] * factor + attended

    @pl.when(block == blocks - 1)
    def _end() -> None:
        total = total_ref[...]
        values = sum_ref[...] / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        values_ref[...] = values.astype(values_ref.dtype)
        lse_ref[...] = _as_row(peak_ref[...] + jnp.log(total))


def _fetch(
    live_ref: jax.Ref,
    slots_ref: jax.Ref,
    rows_ref: jax.Ref,
    semaphores: jax.Ref,
    plan: Plan,
    ids_ref: jax.Ref,
    step: Int[Array, ""],
) -> None:
    """Start the copies of a block of rows, if it has any; zeros where an entry has none."""
    buffer, semaphore = rows_ref.at[step % 2], semaphores.at[step % 2]

    def copy(number: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        places = [number * TURN + each for each in range(TURN)]
        # All ids first: nothing is loaded past a copy that starts, and a load takes its time.
        for place, slot in [(place, ids_ref[0, place]) for place in places]:
            start = _row_copy(slots_ref, slot, buffer, place, semaphore, plan).start
            pl.when(slot >= 0)(start)
        return ()

    def clear(place: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        @pl.when(ids_ref[0, place] < 0)
        def _zero() -> None:
            lines, words = plan.shape
            buffer[:, pl.ds(place, 1)] = jnp.zeros((lines, 1, words), jnp.int32)

        return ()

    live, block = live_ref[step], buffer.shape[1]

    @pl.when(live > 0)
    def _some() -> None:
        lax.fori_loop(0, block // TURN, copy, ())

    @pl.when((live > 0) & (live < block))
    def _others() -> None:
        lax.fori_loop(0, block, clear, ())


def _wait(live: Int[Array, ""], buffer: Slice, semaphore: Slice) -> None:
    """Wait for all rows of a block. A semaphore counts bytes, so any rows stand for others."""

    def rows(count: int) -> Callable[[Int[Array, ""], tuple[()]], tuple[()]]:
        arrived = buffer.at[:, pl.ds(0, count)]

        def wait(_: Int[Array, ""], __: tuple[()]) -> tuple[()]:
            pltpu.make_async_copy(arrived, arrived, semaphore).wait()
            return ()

        return wait

    lax.fori_loop(0, live // TURN, rows(TURN), ())
    lax.fori_loop(0, live % TURN, rows(1), ())


def _row_copy(
    slots_ref: jax.Ref,
    slot: Int[Array, ""],
    buffer: Slice,
    place: Int[Array, ""],
    semaphore: Slice,
    plan: Plan,
) -> Copy:
    """The copy of one row from its slot."""
    lines, words = plan.shape
    if plan.record:
        source = slots_ref.at[pl.ds(slot * plan.record + plan.first, lines)]
        return pltpu.make_async_copy(source, buffer.at[:, pl.ds(place, 1)], semaphore)
    source = slots_ref.at[pl.ds(slot, 1), pl.ds(plan.first, words)]
    return pltpu.make_async_copy(source, buffer.at[0, pl.ds(place, 1)], semaphore)


def _dot(a: Float[Array, "..."], b: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """`a @ b`, or `a @ b.T` along the other axis of `b`, with float32 accumulation."""
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _values(keys: Float[Array, "n planes"], plan: Plan) -> Float[Array, "n value"]:
    """The planes of the values, of which there may be fewer, and narrower ones."""
    found: list[jax.Array] = []
    start = 0
    for part, value in zip(plan.parts, plan.value_parts, strict=False):
        for which in range(part.per_word):
            first = start + which * part.lanes
            found.append(keys[:, first : first + value.lanes])
        start += part.per_word * part.lanes
    return jnp.concatenate(found, axis=1)


def _weights(
    logits: Float[Array, "H n"], peak_ref: jax.Ref, total_ref: jax.Ref
) -> tuple[Float[Array, "H n"], Float[Array, "H 1"]]:
    """Weights by the new maximum, and the factor of what was summed by the old one."""
    before = peak_ref[...]
    peak = jnp.maximum(before, logits.max(axis=1, keepdims=True))
    factor, weights = jnp.exp(before - peak), jnp.exp(logits - peak)
    total_ref[...] = total_ref[...] * factor + weights.sum(axis=1, keepdims=True)
    peak_ref[...] = peak
    return weights, factor


def _as_row(column: Float[Array, "H 1"]) -> Float[Array, "1 H"]:
    """A column as a row: what is on the diagonal, summed over the rows."""
    shape = (column.shape[0], column.shape[0])
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.where(row == lane, column, 0.0).sum(axis=0, keepdims=True)
