"""Index scores on a Hopper GPU: keys stream through shared memory into the matrix units.

A fixed number of programs, one per multiprocessor, share the visible tiles of all requests evenly.
In a program one warpgroup only copies: tiles of keys into a ring of slots, and the queries of a
request when its first tile comes up. The others multiply, in turn: a tile is the left operand of
`wgmma`, `[keys, width] x [width, queries * heads]`, and its products are rectified, weighted and
summed over the heads in registers, where a thread holds parts of two keys and adds up most of a sum
by itself. Scores leave through shared memory. Tiles that no query sees are not read: the copying
warpgroup writes their -inf when it has nothing left to copy.

fp8 keys go through registers: their 128 numbers become float16, which holds every e4m3 number, and
so do the queries, after a power of two per head brings the largest number of each near the top of
float16. What that rounds is 2^-39 of the largest number; the power is taken back from the head's
weight. So products and sums are those of the exact keys in float32. The matrix units' own fp8
products are no choice: they need fp8 queries, and add up in fewer bits than float32 has.

Traffic: visible keys once, queries a few times from the cache, scores once. Work: one query per
request is bound by memory. Eight queries of 32 heads are 2 * 256 * 128 operations per key, and so
bound by the matrix units (as fp8 keys of half the bytes are all the more); there, one warpgroup
sums while the other one multiplies.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.index_scores.types import Keys, ScaledKeys

MOST_COLUMNS = 256
"""Columns of a `wgmma`: queries times heads."""
SWIZZLE = 128
"""Bytes of a row of a tile in shared memory."""
MOST_BOX = 256
"""Numbers along a side of what one copy moves."""
LEAST_COPY = 32
"""Words of a copy into shared memory: every thread of a warpgroup accounts for a byte or more."""
MOST_WIDTH = 256
DEPTH = 64
"""Numbers of a key that are multiplied at once: a row of a tile of 16-bit numbers."""
UNIT = 8
"""Columns that the threads of a quarter warp hold side by side."""
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of what a product has per row and per column."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
        rows: keys of a tile, a multiple of `product`.
        product: keys of a product, a multiple of 64.
        stages: slots of the ring of tiles, a multiple of `consumers`.
        consumers: warpgroups that multiply.
        buffers: requests whose queries are held at once.
        turns: consumers multiply one after another, so that one sums while another one multiplies.
        ahead: with turns, multiplications of `DEPTH` numbers that are still running when the next
            consumer starts.
        held: weights stay in registers, and are not read again for every tile.
        staged: fp8 keys go back to shared memory as float16, and not from registers into a product.
        registers: of a thread that multiplies, and of one that copies.
        programs: one per multiprocessor.
    """

    rows: int = 64
    product: int = 64
    stages: int = 8
    consumers: int = 2
    buffers: int = 2
    turns: bool = False
    ahead: int = 0
    held: bool = False
    staged: bool = False
    registers: tuple[int, int] = (232, 40)
    programs: int = 132


class Spec(NamedTuple):
    """What is static in a kernel.

    Attributes:
        rows: requests times groups of queries, each of which passes over its request's keys.
        groups: groups of queries of a request.
        count: queries of a group.
        heads: heads of a query, padded.
        positions: C.
        width: numbers of a key.
        scaled: whether the keys are fp8 numbers with scales.
        interpreted: whether the kernel runs in the interpreter.
        tuning: how the work is cut.
    """

    rows: int
    groups: int
    count: int
    heads: int
    positions: int
    width: int
    scaled: bool
    interpreted: bool
    tuning: Tuning

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return self.count * self.heads

    @property
    def in_registers(self) -> bool:
        """Whether the left operand of a product is."""
        return self.scaled and not self.tuning.staged


class Operands(NamedTuple):
    """What the kernel reads and writes, in global memory.

    Attributes:
        tiles: how many tiles of each row are visible; padded.
        visible: of each query of a row.
        queries: columns of a row: all heads of one query before the next.
        weights: of the same columns.
        keys: numbers.
        scales: of all keys, one request after the other; None without.
        scores: of a row's queries.
    """

    tiles: Int[Array, " padded"]
    visible: Int[Array, "rows queries"]
    queries: Float[Array, "rows columns width"]
    weights: Float[Array, "rows columns"]
    keys: Float[Array, "R C width"]
    scales: Float[Array, " RC"] | None
    scores: Any = None


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers of what it holds.

    Attributes:
        keys: the ring of tiles.
        scales: of the same tiles; None without.
        queries: of as many rows as there are buffers.
        weights: of the same rows.
        tiles: how many tiles of each row are visible.
        staged: float16 keys of a product of each consumer; None without.
        scores: two tiles of scores of each consumer, on their way out.
        hidden: -inf.
        full: a slot of the ring holds its tile.
        free: a slot of the ring has been read.
        queries_full: a buffer holds its queries and weights.
        queries_free: a buffer has been read.
        tiles_full: `tiles` is there.
        turn: a consumer may start its product.
    """

    keys: Any
    scales: Any
    queries: Any
    weights: Any
    tiles: Any
    staged: Any
    scores: Any
    hidden: Any
    full: Any
    free: Any
    queries_full: Any
    queries_free: Any
    tiles_full: Any
    turn: Any


class Segment(NamedTuple):
    """Tiles of one row that a program scores.

    Attributes:
        row: the row.
        first: its first tile.
        end: the tile after its last one.
        step: how many tiles the program has had before.
        number: how many segments it has had before.
    """

    row: Int[Array, ""]
    first: Int[Array, ""]
    end: Int[Array, ""]
    step: Int[Array, ""]
    number: Int[Array, ""]


def default_tuning(count: int, heads: int, *, scaled: bool) -> Tuning:
    """The tuning for T queries per request of so many heads."""
    if min(count * heads, MOST_COLUMNS) <= MOST_COLUMNS // 2:
        return Tuning(stages=16) if scaled else Tuning()
    return Tuning(stages=12 if scaled else 6, buffers=1, turns=True)


def supports(queries: Float[Array, "R T heads width"], keys: Keys) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, _, heads, width = queries.shape
    requests, positions, _ = keys.shape
    scaled = isinstance(keys, ScaledKeys)
    numbers = SWIZZLE // keys.dtype.itemsize
    if queries.dtype != jnp.bfloat16:
        return f"queries of {queries.dtype} (only bfloat16)"
    if keys.dtype != (jnp.float8_e4m3fn if scaled else jnp.bfloat16):
        return f"keys of {keys.dtype} (only bfloat16, and float8_e4m3fn with scales)"
    if width % numbers or width > MOST_WIDTH:
        return f"keys of {width} numbers (only multiples of {numbers} up to {MOST_WIDTH})"
    if heads > MOST_COLUMNS:
        return f"{heads} heads (at most {MOST_COLUMNS})"
    if scaled and requests * positions >= 2**31:
        return f"{requests} x {positions} scales (fewer than 2^31)"
    return None


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "R T C"]:
    """See `api.index_scores`. `interpret` are parameters of the GPU interpreter."""
    requests, count, heads, _ = queries.shape
    positions = keys.shape[1]
    scaled = isinstance(keys, ScaledKeys)
    tuning = tuning or default_tuning(count, heads, scaled=scaled)
    interpreted = interpret is not None
    operands, spec = _operands(queries, weights, keys, visible, tuning, interpreted=interpreted)
    # Rows of scores start at multiples of 16 bytes: the copy engine wants that.
    padded = _round_up(spec.positions, 4) + interpreted * MOST_BOX
    run = plgpu.kernel(
        functools.partial(_kernel, spec=spec),
        out_type=jax.ShapeDtypeStruct((spec.rows, spec.count, padded), jnp.float32),
        scratch_types=[_shared(spec, operands)],
        grid=(tuning.programs,),
        grid_names=("program",),
        num_threads=tuning.consumers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    scores = run(*(operand for operand in operands if operand is not None))
    scores = scores.reshape(requests, spec.groups * spec.count, padded)
    return scores[:, :count, :positions]


def _round_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return pl.cdiv(size, unit) * unit


def _operands(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    tuning: Tuning,
    *,
    interpreted: bool,
) -> tuple[Operands, Spec]:
    """Group and pad what is small; with the sizes of GLM there is nothing to pad but `tiles`."""
    requests, count, heads, width = queries.shape
    heads_more = _round_up(heads, UNIT) - heads
    groups = pl.cdiv(count, MOST_COLUMNS // (heads + heads_more))
    together = pl.cdiv(count, groups)
    count_more = groups * together - count
    rows, columns = requests * groups, together * (heads + heads_more)
    numbers, scales = keys if isinstance(keys, ScaledKeys) else (keys, None)
    if scales is not None:
        queries, weights = _float16_queries(queries, weights)
    # A tile may reach over the end of the keys: what a copy finds there is zeros, and what it leaves
    # there is dropped. Not so in the interpreter of jax 0.10.
    short = _round_up(keys.shape[1], tuning.rows) - keys.shape[1]
    if short and (interpreted or keys.shape[1] < tuning.rows):
        numbers = jnp.pad(numbers, ((0, 0), (0, short), (0, 0)))
        scales = None if scales is None else jnp.pad(scales, ((0, 0), (0, short)))
    queries = jnp.pad(queries, ((0, 0), (0, count_more), (0, heads_more), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, count_more), (0, heads_more)))
    visible = jnp.pad(visible, ((0, 0), (0, count_more))).reshape(rows, together)
    # A maximum of columns and not over an axis: one small kernel, or part of the one before.
    most = functools.reduce(jnp.maximum, [visible[:, query] for query in range(together)])
    tiles = pl.cdiv(jnp.clip(most, 0, keys.shape[1]), tuning.rows)
    operands = Operands(
        tiles=jnp.pad(tiles, (0, _round_up(rows, LEAST_COPY) - rows)),
        visible=visible,
        queries=queries.reshape(rows, columns, width),
        weights=weights.reshape(rows, columns),
        keys=numbers,
        scales=None if scales is None else scales.reshape(-1),
    )
    return operands, Spec(
        rows=rows,
        groups=groups,
        count=together,
        heads=heads + heads_more,
        positions=numbers.shape[1],
        width=width,
        scaled=scales is not None,
        interpreted=interpreted,
        tuning=tuning,
    )


def _float16_queries(
    queries: Float[Array, "R T heads width"], weights: Float[Array, "R T heads"]
) -> tuple[Float[Array, "R T heads width"], Float[Array, "R T heads"]]:
    """bfloat16 queries as float16, and weights that undo the power of two that this takes."""
    exact = queries.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(exact), axis=-1))
    # In two steps: each is a power of two in float32, whatever the exponent.
    half = (15 - exponent) // 2
    steps = jnp.exp2(half.astype(jnp.float32)), jnp.exp2((15 - exponent - half).astype(jnp.float32))
    scaled = exact * steps[0][..., None] * steps[1][..., None]
    return scaled.astype(jnp.float16), weights / steps[0] / steps[1]


def _shared(spec: Spec, operands: Operands) -> Shared:
    """The shared memory of a program."""
    tuning = spec.tuning

    def tiled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
        tiling = plgpu.TilingTransform((8, SWIZZLE // dtype.itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(SWIZZLE)))

    float32 = lambda *shape: plgpu.SMEM(shape, jnp.float32)
    barrier = lambda number, arrivals=1: plgpu.Barrier(num_barriers=number, num_arrivals=arrivals)
    return Shared(
        keys=tiled((tuning.stages, tuning.rows, spec.width), operands.keys.dtype),
        scales=float32(tuning.stages, tuning.rows) if spec.scaled else None,
        queries=tiled((tuning.buffers, spec.columns, spec.width), operands.queries.dtype),
        weights=float32(tuning.buffers, spec.columns),
        tiles=plgpu.SMEM(operands.tiles.shape, jnp.int32),
        staged=tiled((tuning.consumers, tuning.product, spec.width), operands.queries.dtype)
        if spec.scaled and tuning.staged
        else None,
        scores=float32(tuning.consumers, 2, spec.count, tuning.rows),
        hidden=float32(spec.count, MOST_BOX),
        full=barrier(tuning.stages, 2 if spec.scaled else 1),
        free=barrier(tuning.stages),
        queries_full=barrier(tuning.buffers, 2),
        queries_free=barrier(tuning.buffers, tuning.consumers),
        tiles_full=barrier(1),
        turn=barrier(tuning.consumers),
    )


def _kernel(*refs: Any, spec: Spec) -> None:
    """One program."""
    *inputs, scores, shared = refs
    scales = inputs.pop() if spec.scaled else None
    operands = Operands(*inputs, scales, scores)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == spec.tuning.consumers)
    def _() -> None:
        plgpu.set_max_registers(spec.tuning.registers[1], action="decrease")
        plgpu.copy_gmem_to_smem(operands.tiles, shared.tiles, shared.tiles_full.at[0])
        plgpu.barrier_wait(shared.tiles_full.at[0])
        _for_segments(shared, spec, functools.partial(_copy_segment, operands, shared, spec))
        _hide(operands, shared, spec)
        _drain(shared.free, spec.tuning.stages)
        _drain(shared.queries_free, spec.tuning.buffers)

    @pl.when(warpgroup < spec.tuning.consumers)
    def _() -> None:
        plgpu.set_max_registers(spec.tuning.registers[0], action="increase")
        _release_all(shared, spec, warpgroup)
        plgpu.barrier_wait(shared.tiles_full.at[0])
        score = functools.partial(_score_segment, operands, shared, spec, warpgroup)
        steps = _for_segments(shared, spec, score)
        if spec.tuning.turns:
            _finish_turns(shared, spec, warpgroup, steps)
        plgpu.wait_smem_to_gmem(0)


def _drain(barriers: Any, number: int) -> None:
    """Wait until all that is in shared memory has been read."""
    lax.fori_loop(0, number, lambda at, _: plgpu.barrier_wait(barriers.at[at]), None)


def _finish_turns(
    shared: Shared, spec: Spec, consumer: Int[Array, ""], steps: Int[Array, ""]
) -> None:
    """Pass on the turns of a consumer that has no tile in the last round; take back the last."""
    rest = _consumer_of(steps, spec)

    @pl.when((rest > 0) & (consumer >= rest))
    def _() -> None:
        for _ in range(spec.tuning.rows // spec.tuning.product):
            plgpu.barrier_wait(shared.turn.at[consumer])
            plgpu.barrier_arrive(shared.turn.at[_consumer_of(consumer + 1, spec)])

    pl.when(consumer == 0)(lambda: plgpu.barrier_wait(shared.turn.at[0]))


def _consumer_of(step: Int[Array, ""], spec: Spec) -> Int[Array, ""]:
    """Steps go round the consumers; so do the slots of the ring, which they divide."""
    return lax.rem(step, jnp.int32(spec.tuning.consumers))


def _release_all(shared: Shared, spec: Spec, consumer: Int[Array, ""]) -> None:
    """At the start all slots and buffers are free, and it is the first consumer's turn."""
    for slot in range(spec.tuning.stages):
        pl.when(consumer == slot % spec.tuning.consumers)(
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


def _total(shared: Shared, spec: Spec) -> Int[Array, ""]:
    """Visible tiles of all rows."""
    add = lambda row, total: total + shared.tiles[row]
    return lax.fori_loop(0, spec.rows, add, jnp.int32(0))


def _for_segments(shared: Shared, spec: Spec, run: Callable[[Segment], None]) -> Int[Array, ""]:
    """Call `run` for the segments of this program, in order; the number of their tiles."""
    start, end = _share(_total(shared, spec), spec)

    def visit(row: Int[Array, ""], carry: Any) -> Any:
        before, step, number = carry
        tiles = shared.tiles[row]
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
        at, full = tile * tuning.rows, shared.full.at[slot]
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
    start, end = _share(spec.rows * tiles - _total(shared, spec), spec)
    shared.hidden[...] = jnp.full((spec.count, MOST_BOX), -jnp.inf, jnp.float32)
    plgpu.commit_smem()
    together = MOST_BOX // spec.tuning.rows

    def visit(row: Int[Array, ""], before: Int[Array, ""]) -> Int[Array, ""]:
        shown = shared.tiles[row]
        first = jnp.maximum(start - before, 0)
        after = jnp.minimum(end - before, tiles - shown)

        def hide(box: Int[Array, ""], _: None) -> None:
            # The last box may cover tiles of the next program, which are as hidden.
            at = (shown + first + box * together) * spec.tuning.rows
            scores = operands.scores.at[row, :, pl.ds(at, MOST_BOX)]
            plgpu.copy_smem_to_gmem(shared.hidden, scores)

        boxes = lax.div(jnp.maximum(after - first, 0) + together - 1, jnp.int32(together))
        lax.fori_loop(0, boxes, hide, None)
        return before + tiles - shown

    lax.fori_loop(0, spec.rows, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


class Place(NamedTuple):
    """Where a consumer is.

    Attributes:
        consumer: which one it is.
        buffer: that of its queries and weights.
        slot: that of its tile.
    """

    consumer: Int[Array, ""]
    buffer: Int[Array, ""]
    slot: Int[Array, ""]


def _score_segment(
    operands: Operands, shared: Shared, spec: Spec, consumer: Int[Array, ""], segment: Segment
) -> None:
    """Score the tiles of a segment that are this consumer's: those of every n-th step."""
    tuning = spec.tuning
    consumers = jnp.int32(tuning.consumers)
    buffer = lax.rem(segment.number, jnp.int32(tuning.buffers))
    seen = [operands.visible[segment.row, query] for query in range(spec.count)]
    skipped = _consumer_of(consumer + consumers - _consumer_of(segment.step, spec), spec)
    tiles = lax.div(segment.end - segment.first - skipped + consumers - 1, consumers)
    plgpu.barrier_wait(shared.queries_full.at[buffer])
    held = _weights(shared, spec, buffer) if tuning.held else None

    def score(number: Int[Array, ""], _: None) -> None:
        tile = skipped + number * consumers
        step, at = segment.step + tile, (segment.first + tile) * tuning.rows
        place = Place(consumer, buffer, lax.rem(step, jnp.int32(tuning.stages)))
        out = shared.scores.at[consumer, lax.rem(lax.div(step, consumers), jnp.int32(2))]
        plgpu.barrier_wait(shared.full.at[place.slot])
        for first, sums in _sums(shared, spec, place, held):
            ahead = _lay_out(lax.iota(jnp.int32, tuning.product), ROWS, spec)
            for query, visible in enumerate(seen):
                scores = jnp.where(at + first + ahead < visible, sums[query], -jnp.inf)
                out[query, first : first + tuning.product] = scores
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, operands.scores.at[segment.row, :, pl.ds(at, tuning.rows)])

    lax.fori_loop(0, tiles, score, None)
    plgpu.barrier_arrive(shared.queries_free.at[buffer])


def _lay_out(values: Shaped[Array, "*n"], layout: Any, spec: Spec) -> Shaped[Array, "*n"]:
    """Say which thread holds which of the values. The interpreter of jax 0.10 knows no layouts."""
    return values if spec.interpreted else plgpu.layout_cast(values, layout)


def _weights(shared: Shared, spec: Spec, buffer: Int[Array, ""]) -> list[Float[Array, "unit"]]:
    """Weights of a buffer, by units of columns."""
    units = range(0, spec.columns, UNIT)
    return [_lay_out(shared.weights[buffer, at : at + UNIT], COLUMNS, spec) for at in units]


def _sums(
    shared: Shared, spec: Spec, place: Place, held: list[Float[Array, "unit"]] | None
) -> Iterator[tuple[int, list[Float[Array, " product"]]]]:
    """`sum_h weights_h * relu(query_h . key)` of every query, product by product of a tile."""
    size = spec.tuning.product
    firsts = range(0, spec.tuning.rows, size)
    keys = _left_operand(shared, spec, place, 0)
    for first in firsts:
        last = first == firsts[-1]
        prepare = lambda: None
        if spec.in_registers and not last:
            prepare = functools.partial(_left_operand, shared, spec, place, first + size)
        products, following = _products(shared, spec, place, keys, prepare)
        scales = None
        if spec.scaled:
            scales = _lay_out(shared.scales[place.slot, first : first + size], ROWS, spec)
        if last:
            plgpu.barrier_arrive(shared.free.at[place.slot])
        elif not spec.in_registers:
            following = _left_operand(shared, spec, place, first + size)
        keys = following
        sums = _weighted(
            products, _weights(shared, spec, place.buffer) if held is None else held, spec.heads
        )
        yield first, [total if scales is None else total * scales for total in sums]


def _left_operand(shared: Shared, spec: Spec, place: Place, first: int) -> Any:  # noqa: ANN401
    """Keys of a tile from `first` on, as many as a product has: in shared memory or registers."""
    keys = shared.keys.at[place.slot, first : first + spec.tuning.product]
    if not spec.scaled:
        return keys
    numbers = _lay_out(keys[...], plgpu.Layout.WGMMA_UPCAST_2X, spec)
    if not spec.tuning.staged:
        return _lay_out(numbers, plgpu.Layout.WGMMA, spec).astype(jnp.float16)
    # Left to itself the compiler converts registers as late as it can: between turn and product.
    staged = shared.staged.at[place.consumer]
    staged[...] = numbers.astype(jnp.float16)
    plgpu.commit_smem()
    return staged


def _products(
    shared: Shared,
    spec: Spec,
    place: Place,
    keys: Any,  # noqa: ANN401
    prepare: Callable[[], Any],
) -> Any:  # noqa: ANN401
    """Products of keys with all columns of a buffer; and what `prepare` made in the meantime."""
    tuning = spec.tuning

    def multiply(products: Any) -> Any:  # noqa: ANN401
        for first in range(0, spec.width, DEPTH):
            depth = slice(first, first + DEPTH)
            queries = shared.queries.at[place.buffer, :, depth]
            left = keys[:, depth] if spec.in_registers else keys.at[:, depth]
            if not spec.interpreted:
                plgpu.wgmma(products, left, queries.transpose((1, 0)))
        # The scores before the last ones have left, and their room is free.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        prepared = prepare()
        if tuning.turns:
            plgpu.wgmma_wait(tuning.ahead)
            plgpu.barrier_arrive(shared.turn.at[_consumer_of(place.consumer + 1, spec)])
        if spec.interpreted:
            # The interpreter multiplies no registers, and that of jax 0.10 transposes nothing.
            queries = shared.queries[place.buffer]
            exact = jnp.dot(keys[...], queries.T, preferred_element_type=jnp.float32)
            return exact, prepared
        return products[...], prepared

    if tuning.turns:
        plgpu.barrier_wait(shared.turn.at[place.consumer])
    return pl.run_scoped(multiply, plgpu.ACC((tuning.product, spec.columns), jnp.float32))


def _weighted(
    products: Float[Array, "product columns"], weights: list[Float[Array, "unit"]], heads: int
) -> Iterator[Float[Array, " product"]]:
    """Rectified and weighted products, summed over the heads of each query.

    Unit by unit, so that a sum is a chain of multiplications with addition in each thread, and
    only its end is added up across threads.
    """
    for first in range(0, products.shape[1], heads):
        total = None
        for at in range(first, first + heads, UNIT):
            weight = lax.broadcast_in_dim(weights[at // UNIT], (len(products), UNIT), (1,))
            term = jnp.maximum(products[:, at : at + UNIT], 0.0) * weight
            total = term if total is None else total + term
        yield total.sum(axis=1)
