"""What the parts of the index scores kernel share: how work is cut, and where everything is."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

SWIZZLE = 128
"""Bytes of a row of a tile in shared memory."""
MOST_BOX = 256
"""Numbers along a side of what one copy moves."""
CONSUMERS = 2
"""Warpgroups that multiply. With a third one there are too few registers for 256 columns."""
UNIT = 8
"""Columns that the threads of a quarter warp hold side by side."""
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of what a product has per row and per column."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
        rows: keys of a tile, a multiple of 64, at most `MOST_BOX`.
        stages: slots of the ring of tiles, a multiple of `CONSUMERS`.
        buffers: requests whose queries are held at once.
        turns: consumers multiply one after another, so that one sums while the other one
            multiplies, and weights stay in registers: for products that take longer than sums.
        programs: one per multiprocessor.
    """

    rows: int = 64
    stages: int = 8
    buffers: int = 2
    turns: bool = False
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


class Operands(NamedTuple):
    """What the kernel reads and writes in global memory: arrays outside of it, references inside.

    Attributes:
        tiles: int32 [lines, words], how many tiles of each row are visible; padded.
        visible: int32 [rows, queries] of a row.
        queries: [rows, columns, width]: all heads of one query before the next.
        weights: float32 [rows, columns] of the same columns; padded.
        keys: [R, C, width], numbers.
        scales: float32 [R C] of all keys, one request after the other; None without.
        scores: float32 [rows, queries, C] of a row's queries, the result; None outside.
    """

    tiles: Any
    visible: Any
    queries: Any
    weights: Any
    keys: Any
    scales: Any
    scores: Any = None


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers of what it holds.

    Attributes:
        keys: the ring of tiles.
        scales: of the same tiles; None without.
        queries: of as many rows as there are buffers.
        weights: of the same rows.
        tiles: how many tiles of each row are visible, in lines.
        scores: two tiles of scores of each consumer, on their way out.
        hidden: -inf, as many as the scores of a tile.
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


def shared_memory(spec: Spec, operands: Operands) -> Shared:
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
        weights=float32(tuning.buffers, operands.weights.shape[1]),
        tiles=plgpu.SMEM(operands.tiles.shape, jnp.int32),
        scores=float32(CONSUMERS, 2, spec.count, tuning.rows),
        hidden=float32(spec.count, tuning.rows),
        full=barrier(tuning.stages, 2 if spec.scaled else 1),
        free=barrier(tuning.stages),
        queries_full=barrier(tuning.buffers, 2),
        queries_free=barrier(tuning.buffers, CONSUMERS),
        tiles_full=barrier(1),
        turn=barrier(CONSUMERS),
    )


def lay_out(values: Shaped[Array, "*n"], layout: Any, spec: Spec) -> Shaped[Array, "*n"]:
    """Say which thread holds which of the values. The interpreter of jax 0.10 knows no layouts."""
    return values if spec.interpreted else plgpu.layout_cast(values, layout)


def start_of(tile: Int[Array, ""], spec: Spec) -> Int[Array, ""]:
    """First position of a tile.

    The last tile ends where the keys end, and so has some keys of the one before: of 150 keys in
    tiles of 64, tile 2 are keys 86 to 149. A copy that reaches over the end of a row is not cut off
    there if it is contiguous, but goes on in the next row.
    """
    return jnp.minimum(tile * spec.tuning.rows, spec.positions - spec.tuning.rows)


def consumer_of(step: Int[Array, ""]) -> Int[Array, ""]:
    """Steps go round the consumers; so do the slots of the ring, whose number they divide."""
    return lax.rem(step, jnp.int32(CONSUMERS))
