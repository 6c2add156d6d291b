"""A program of the index scores kernel: which work is its own, and what its warpgroups do.

One warpgroup copies keys, queries and weights into shared memory; the others multiply. All know
from the numbers of visible tiles which part of the work is theirs, so nothing but barriers passes
between them: `full` and `free` for each slot of a ring or buffer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.index_scores.mosaic_scores import score_segment
from pallas_kernels.index_scores.mosaic_types import (
    CONSUMERS,
    ROWS,
    Operands,
    Segment,
    Shared,
    Spec,
    consumer_of,
    lay_out,
    start_of,
)

REGISTERS_TO_MULTIPLY, REGISTERS_TO_COPY = 232, 40
"""Of a CUDA thread: what the threads of one warpgroup give up, those of the others get."""


def program(*refs: Any, spec: Spec, **scratch: Any) -> None:
    """One program."""
    *inputs, scores = refs
    shared = Shared(**scratch)
    scales = inputs.pop() if spec.scaled else None
    operands = Operands(*inputs, scales=scales, scores=scores)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        plgpu.copy_gmem_to_smem(operands.tiles, shared.tiles, shared.tiles_full.at[0])
        plgpu.barrier_wait(shared.tiles_full.at[0])
        _for_segments(shared, spec, functools.partial(_copy_segment, operands, shared, spec))
        _hide(operands, shared, spec)
        _drain(shared.free, spec.tuning.stages)
        _drain(shared.queries_free, spec.tuning.buffers)

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS_TO_MULTIPLY, action="increase")
        _release_all(shared, spec, warpgroup)
        plgpu.barrier_wait(shared.tiles_full.at[0])
        score = functools.partial(score_segment, operands, shared, spec, warpgroup)
        steps = _for_segments(shared, spec, score)
        if spec.tuning.turns:
            _finish_turns(shared, warpgroup, steps)
        plgpu.wait_smem_to_gmem(0)


def _drain(barriers: Any, number: int) -> None:
    """Wait until all that is in shared memory has been read."""
    lax.fori_loop(0, number, lambda at, _: plgpu.barrier_wait(barriers.at[at]), None)


def _finish_turns(shared: Shared, consumer: Int[Array, ""], steps: Int[Array, ""]) -> None:
    """Take back the turn that nobody takes: that after the last step."""
    pl.when(consumer_of(steps) == consumer)(lambda: plgpu.barrier_wait(shared.turn.at[consumer]))


def _release_all(shared: Shared, spec: Spec, consumer: Int[Array, ""]) -> None:
    """At the start all slots and buffers are free, and it is the first consumer's turn."""
    for slot in range(spec.tuning.stages):
        pl.when(consumer == slot % CONSUMERS)(
            functools.partial(plgpu.barrier_arrive, shared.free.at[slot])
        )
    for buffer in range(spec.tuning.buffers):
        plgpu.barrier_arrive(shared.queries_free.at[buffer])
    if spec.tuning.turns:
        pl.when(consumer == 0)(lambda: plgpu.barrier_arrive(shared.turn.at[0]))


def _share(total: Int[Array, ""], spec: Spec) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The part of a total that is this program's: its first, and the one after its last."""
    programs = jnp.int32(spec.tuning.programs)
    program = lax.axis_index("program")
    # Quotient and rest apart: the product of both could exceed 31 bits.
    each, rest = lax.div(total, programs), lax.rem(total, programs)
    bound = lambda at: at * each + jnp.minimum(at, rest)
    return bound(program), bound(program + 1)


def _tiles_of(row: Int[Array, ""], shared: Shared) -> Int[Array, ""]:
    """Visible tiles of a row."""
    line = jnp.int32(shared.tiles.shape[1])
    return shared.tiles[lax.div(row, line), lax.rem(row, line)]


def _total(of: Callable[[Int[Array, ""]], Int[Array, ""]], spec: Spec) -> Int[Array, ""]:
    """The sum of a number of all rows."""
    return lax.fori_loop(0, spec.rows, lambda row, total: total + of(row), jnp.int32(0))


def _for_segments(shared: Shared, spec: Spec, run: Callable[[Segment], None]) -> Int[Array, ""]:
    """Call `run` for the segments of this program, in order; the number of their tiles."""
    tiles_of = functools.partial(_tiles_of, shared=shared)
    start, end = _share(_total(tiles_of, spec), spec)

    def visit(row: Int[Array, ""], carry: Any) -> Any:
        before, step, number = carry
        tiles = tiles_of(row)
        first = jnp.maximum(start - before, 0)
        after = jnp.minimum(end - before, tiles)
        some = first < after
        pl.when(some)(lambda: run(Segment(row, first, after, step, number)))
        step = step + jnp.maximum(after - first, 0)
        return before + tiles, step, number + some.astype(jnp.int32)

    return lax.fori_loop(0, spec.rows, visit, (jnp.int32(0),) * 3)[1]


def _copy_segment(operands: Operands, shared: Shared, spec: Spec, segment: Segment) -> None:
    """Copy the queries and the tiles of a segment, each as soon as there is room."""
    tuning = spec.tuning
    buffer = lax.rem(segment.number, jnp.int32(tuning.buffers))
    request = lax.div(segment.row, jnp.int32(spec.groups))
    full = shared.queries_full.at[buffer]
    plgpu.barrier_wait(shared.queries_free.at[buffer])
    plgpu.copy_gmem_to_smem(operands.queries.at[segment.row], shared.queries.at[buffer], full)
    plgpu.copy_gmem_to_smem(operands.weights.at[segment.row], shared.weights.at[buffer], full)

    def copy(tile: Int[Array, ""], _: None) -> None:
        slot = lax.rem(segment.step + tile - segment.first, jnp.int32(tuning.stages))
        at, full = start_of(tile, spec), shared.full.at[slot]
        plgpu.barrier_wait(shared.free.at[slot])
        numbers = operands.keys.at[request, pl.ds(at, tuning.rows)]
        plgpu.copy_gmem_to_smem(numbers, shared.keys.at[slot], full)
        if spec.scaled:
            scales = operands.scales.at[pl.ds(request * spec.positions + at, tuning.rows)]
            plgpu.copy_gmem_to_smem(scales, shared.scales.at[slot], full)

    lax.fori_loop(segment.first, segment.end, copy, None)


def _hide(operands: Operands, shared: Shared, spec: Spec) -> None:
    """Write the -inf of this program's share of the tiles that no query sees."""
    tiles = pl.cdiv(spec.positions, spec.tuning.rows)
    hidden_of = lambda row: tiles - _tiles_of(row, shared)
    start, end = _share(_total(hidden_of, spec), spec)
    hidden = lay_out(jnp.full(spec.tuning.rows, -jnp.inf, jnp.float32), ROWS, spec)
    for query in range(spec.count):
        shared.hidden[query] = hidden
    plgpu.commit_smem()

    def visit(row: Int[Array, ""], before: Int[Array, ""]) -> Int[Array, ""]:
        def hide(number: Int[Array, ""], _: None) -> None:
            at = start_of(_tiles_of(row, shared) + number, spec)
            scores = operands.scores.at[row, :, pl.ds(at, spec.tuning.rows)]
            plgpu.copy_smem_to_gmem(shared.hidden, scores)

        number = hidden_of(row)
        first, after = jnp.maximum(start - before, 0), jnp.minimum(end - before, number)
        lax.fori_loop(first, jnp.maximum(first, after), hide, None)
        return before + number

    lax.fori_loop(0, spec.rows, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
