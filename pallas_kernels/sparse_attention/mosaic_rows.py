"""The first stage of sparse attention on Hopper: selected rows to shared memory, as bfloat16.

A block of rows lies in shared memory as the matrix units read it: tiles of 8 rows by 64 numbers,
1,024 bytes each, row tile after row tile; within a tile, the 16-byte chunks of row r are permuted
by `chunk ^ r`, which keeps every access free of bank conflicts (the 128-byte swizzle).

A warpgroup moves 16 rows per pass: eight CUDA threads share a row and take every eighth chunk.

    thread 27 = row 3 of the pass, chunk 3: writes chunk 3 ^ 3 = 0 of row 3 in each tile
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.common.mosaic import (
    SCALAR,
    WARPGROUP,
    Ref,
    address,
    integer,
    ptx,
    ptx_if,
    scalar,
    thread_index,
    wide,
)
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.sparse_attention.mosaic_work import BLOCK, CHUNK, TILE, Rows

TILE_BYTES = 1024
PER_ROW = 8
"""CUDA threads that share a row."""
ROWS_PER_PASS = WARPGROUP // PER_ROW
PASSES = BLOCK // ROWS_PER_PASS
TRANSFORMS = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
IDS = plgpu.Layout.WG_STRIDED((PASSES * WARPGROUP,), vec_size=1)
"""Layout of the slots of a block: each CUDA thread has those of its row in every pass."""
LESS = arith.CmpIPredicate.ult


def init_arrivals(arrived: Ref, stages: int) -> None:
    """Set up an mbarrier per stage on which every CUDA thread of one warpgroup arrives.

    They are our own, since those of Pallas cannot be reached from inline code, and only inline code
    can let a copy arrive by itself when it is done.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def init(_: Any, ref: Any) -> None:
        first = arith.cmpi(arith.CmpIPredicate.eq, thread_index(), integer(0))
        for stage in range(stages):
            barrier = arith.addi(address(ref, 32), integer(8 * stage))
            ptx_if(first, f"mbarrier.init.shared::cta.b64 [$1], {WARPGROUP};", "r", barrier)
        mgpu.utils.warpgroup_barrier()

    init(arrived)


def wait_arrival(arrived: Ref, stage: jax.Array, parity: jax.Array) -> None:
    """Wait until a stage is filled, and let the matrix units see what was written.

    The fence is the reader's, since a copy that arrives by itself has no writer that could fence.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def wait(_: Any, ref: Any, stage: Any, parity: Any) -> None:
        ptx(
            "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
            "@p bra DONE; bra WAIT; DONE: fence.proxy.async.shared::cta; }",
            "r,r",
            _barrier(ref, stage),
            scalar(parity),
        )

    wait(arrived, stage, parity)


def load_slots(location: Ref) -> jax.Array:
    """The slots of a block in the layout IDS."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((PASSES * WARPGROUP,), jnp.int32, layout=IDS),
    )
    def load(_: Any, ref: Any) -> Any:
        row = arith.divui(thread_index(), integer(PER_ROW))
        registers = []
        for number in range(PASSES):
            place = arith.addi(row, integer(number * ROWS_PER_PASS))
            slot = memref.load(ref, [arith.index_castui(ir.IndexType.get(), place)])
            registers.append(vector.broadcast(ir.VectorType.get((1,), slot.type), slot))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object), _layout=IDS.to_mgpu(), _is_signed=True
        )

    return load(location)


class Stage(NamedTuple):
    """Where a block goes.

    Attributes:
        rows: the rows, as the matrix units read them.
        slot: their slots.
        arrived: the mbarriers of all stages.
    """

    rows: Ref
    slot: Ref
    arrived: Ref


def fill_stage(
    slots: Ref,
    location: Ref,
    ids: tuple[jax.Array, jax.Array],
    target: Stage,
    stage: jax.Array,
    rows: Rows,
) -> None:
    """Bring the rows of a block to a stage, and arrive there: at once or when copies are done.

    Args:
        slots: records in global memory.
        location: the slots of the block in global memory.
        ids: the same, from `load_slots`, and those of the next block. NO_SLOT makes a row of zeros
            and reads nothing.
        target: where the block goes.
        stage: which stage that is.
        rows: where rows are.
    """
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(ref, ref, IDS, IDS, plgpu.RefType(TRANSFORMS), ref, ref, SCALAR))
    def fill(_: Any, *operands: Any) -> None:
        slots_ref, location_ref, ids, later, rows_ref, slot_ref, arrived_ref, at = operands
        barrier = _barrier(arrived_ref, at)
        _copy_slots(address(slot_ref, 32), address(location_ref, 64))
        place = _place(address(rows_ref, 32), rows.tiles)
        live, starts = _starts(slots_ref, ids, rows)
        if rows.scaled is None:
            _copy_rows(live, starts, place, rows)
            ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", barrier)
        else:
            _copy_bytes(live, starts, place, rows.scaled)
            _prefetch(*_starts(slots_ref, later, rows), rows.scaled)
            _expand_rows(place, rows.scaled)
            ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", barrier)

    fill(slots, location, *ids, *target, stage)


def _copy_slots(target: Any, source: Any) -> None:
    """Slots of the block, for the mask: as a copy, so that they arrive with the rows."""
    thread = thread_index()
    mine = arith.muli(thread, integer(4))
    ptx_if(
        arith.cmpi(LESS, thread, integer(BLOCK)),
        "cp.async.ca.shared.global [$1], [$2], 4;",
        "r,l",
        arith.addi(target, mine),
        arith.addi(source, wide(mine)),
    )


def _starts(slots_ref: Any, ids: Any, rows: Rows) -> tuple[list[Any], list[Any]]:
    """Which rows of the thread there are, and their addresses; those of slot 0 for the others."""
    source = arith.addi(address(slots_ref, 64), integer(rows.offset, 64))
    live: list[Any] = []
    starts: list[Any] = []
    for register in ids.registers:
        slot = vector.extract(register, dynamic_position=[], static_position=[0])
        live.append(arith.cmpi(arith.CmpIPredicate.sge, slot, integer(0)))
        safe = wide(arith.maxsi(slot, integer(0)))
        starts.append(arith.addi(source, arith.muli(safe, integer(rows.record_bytes, 64))))
    return live, starts


def _barrier(ref: Any, stage: Any) -> Any:
    return arith.addi(address(ref, 32), arith.muli(scalar(stage), integer(8)))


class _Place(NamedTuple):
    """The CUDA thread's place in a pass.

    Attributes:
        stage: address of the stage.
        row: row of the pass.
        lane: which of the eight threads of its row.
        line: row within its tile.
        first: address of the row in its first tile.
        tiles: of a row.
    """

    stage: Any
    row: Any
    lane: Any
    line: Any
    first: Any
    tiles: int

    def chunk(self, number: int, tile: int, chunk: Any) -> Any:
        """Address of a chunk of its row in a pass."""
        swizzled = arith.muli(arith.xori(chunk, self.line), integer(CHUNK))
        offset = integer((number * 2 * self.tiles + tile) * TILE_BYTES)
        return arith.addi(self.first, arith.addi(swizzled, offset))


def _place(target: Any, tiles: int) -> _Place:
    row = arith.divui(thread_index(), integer(PER_ROW))
    line = arith.remui(row, integer(8))
    row_tile = arith.muli(arith.divui(row, integer(8)), integer(tiles * TILE_BYTES))
    first = arith.addi(target, arith.addi(row_tile, arith.muli(line, integer(128))))
    lane = arith.remui(thread_index(), integer(PER_ROW))
    return _Place(target, row, lane, line, first, tiles)


def _copy_rows(live: list[Any], starts: list[Any], place: _Place, rows: Rows) -> None:
    """bfloat16 rows: bytes to bytes, without a register."""
    column = arith.muli(place.lane, integer(CHUNK))
    for number, (there, start) in enumerate(zip(live, starts, strict=True)):
        source = arith.addi(start, wide(column))
        for tile in range(rows.tiles):
            left = 2 * rows.width - 128 * tile
            inside = there
            if left < 2 * TILE:
                inside = arith.andi(there, arith.cmpi(LESS, column, integer(left)))
            target = place.chunk(number, tile, place.lane)
            _copy_chunk(target, arith.addi(source, integer(128 * tile, 64)), inside)


def _copy_chunk(target: Any, source: Any, live: Any) -> None:
    """Start to copy a chunk; one that is not live becomes zeros, and is not read."""
    ptx(
        "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
        "r,l,r",
        target,
        source,
        arith.select(live, integer(CHUNK), integer(0)),
    )


def _prefetch(live: list[Any], starts: list[Any], row: ScaledRow) -> None:
    """Ask for the rows of the next block, so that they are in L2 when their stage is free.

    Rows that are expanded have only the stage itself to wait in. A CUDA thread takes a line of 128
    bytes of its row.
    """
    line = arith.muli(arith.remui(thread_index(), integer(PER_ROW)), integer(128))
    inside = arith.cmpi(LESS, line, integer(row.bytes))
    for there, start in zip(live, starts, strict=True):
        at = arith.addi(start, wide(line))
        ptx_if(arith.andi(there, inside), "prefetch.global.L2 [$1];", "l", at)


def _raw_bytes(place: _Place, row: ScaledRow) -> tuple[Any, int]:
    """Address of the thread's row of the first pass in bytes, and how far the rows are apart.

    The bytes go to the end of the stage and are expanded from its beginning, 16 rows at a time.
    With 656 B per row and 1,152 B when expanded, 64 rows of bytes start at 31,744; expanding n
    passes fills the stage up to 18,432 n, and the bytes of later passes start at 31,744 + 10,496 n,
    which is never less. Bytes of the same pass are in registers before anything is stored.
    """
    pitch = -(-row.bytes // CHUNK) * CHUNK
    first = BLOCK // 8 * place.tiles * TILE_BYTES - BLOCK * pitch
    mine = arith.addi(integer(first), arith.muli(place.row, integer(pitch)))
    return arith.addi(place.stage, mine), pitch


def _copy_bytes(live: list[Any], starts: list[Any], place: _Place, row: ScaledRow) -> None:
    """Scaled rows as they are. Threads beyond the end of a row copy its last chunk again."""
    raw, pitch = _raw_bytes(place, row)
    column = arith.muli(place.lane, integer(CHUNK))
    for number, (there, start) in enumerate(zip(live, starts, strict=True)):
        for at in range(0, pitch, PER_ROW * CHUNK):
            inside = arith.minui(column, integer(pitch - CHUNK - at))
            target = arith.addi(raw, integer(number * ROWS_PER_PASS * pitch + at))
            source = arith.addi(start, integer(at, 64))
            _copy_chunk(arith.addi(target, inside), arith.addi(source, wide(inside)), there)


def _expand_rows(place: _Place, row: ScaledRow) -> None:
    """The bfloat16 numbers that the bytes of all rows stand for, pass by pass."""
    raw, pitch = _raw_bytes(place, row)
    ptx("cp.async.wait_all;", "")
    mgpu.utils.warpgroup_barrier()
    for number in range(PASSES):
        here = arith.addi(raw, integer(number * ROWS_PER_PASS * pitch))
        _expand_pass(here, number, place, row)
    ptx("fence.proxy.async.shared::cta;", "")


def _expand_pass(raw: Any, number: int, place: _Place, row: ScaledRow) -> None:
    """Read the bytes of a pass; when every thread has, store its numbers.

    A thread takes eight numbers of each tile of its row, which become one chunk: so the eight
    threads of a row write eight different chunks, and no two meet in a bank.
    """
    mine = arith.addi(raw, arith.muli(place.lane, integer(CHUNK // 2)))
    heads = [_load_words(mine, tile * TILE, 2) for tile in range(row.quantised // TILE)]
    rest = _load_words(
        arith.addi(raw, arith.muli(place.lane, integer(CHUNK))), row.rest_bytes[0], 4
    )
    scales = _load_words(raw, row.scale_byte, 4 if row.scale == "float32" else 2)
    mgpu.utils.warpgroup_barrier()
    split = [_scale(scales, group, row) for group in range(row.groups)]
    for tile, words in enumerate(heads):
        scale = split[tile * TILE // row.group]
        _store_chunk(place, number, tile, [pair for word in words for pair in _expand(word, scale)])
    _store_chunk(place, number, row.quantised // TILE, rest)


def _store_chunk(place: _Place, number: int, tile: int, words: list[Any]) -> None:
    """Store the thread's chunk of a tile."""
    at = place.chunk(number, tile, place.lane)
    ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", at, *words)


def _load_words(start: Any, offset: int, count: int) -> list[Any]:
    """So many words from shared memory."""
    names = ", ".join(f"${number}" for number in range(count))
    constraints = ",".join(["=r"] * count + ["r"])
    text = f"ld.shared.v{count}.b32 {{{names}}}, [${count} + {offset}];"
    return ptx(text, constraints, start, results=count)


def _scale(scales: list[Any], group: int, row: ScaledRow) -> tuple[Any, Any]:
    """The scale of a group as the sum of two bfloat16 numbers, each twice in a word."""
    if row.scale == "float32":
        bits = scales[group]
    else:
        byte = arith.shrui(scales[group // 4], integer(8 * (group % 4)))
        bits = arith.shli(arith.andi(byte, integer(255)), integer(23))
    high, low = ptx(
        "{ .reg .f32 h, l; cvt.rn.bf16x2.f32 $0, $2, $2; and.b32 h, $0, 0xffff0000; "
        "sub.rn.f32 l, $2, h; cvt.rn.bf16x2.f32 $1, l, l; }",
        "=&r,=&r,f",
        arith.bitcast(ir.F32Type.get(), bits),
        results=2,
    )
    return high, low


def _expand(word: Any, scale: tuple[Any, Any]) -> list[Any]:
    """Four e4m3 numbers as two words of two bfloat16 each.

    The bits of e4m3 are shifted to where bfloat16 has sign, exponent and mantissa, which makes them
    too small by 2**(127 - 7), below the smallest normal number too; then multiplied by 2**120,
    which is exact, and by both parts of the scale. Converting instructions are slower.
    """
    two = (
        "prmt.b32 x, $2, 0, {bytes}; shr.u32 y, x, 4; and.b32 y, y, 0x07f007f0; "
        "lop3.b32 y, x, 0x80008000, y, 0xea; mul.rn.bf16x2 y, y, c; "
        "mul.rn.bf16x2 x, y, $4; fma.rn.bf16x2 {result}, y, $3, x; "
    )
    return ptx(
        "{ .reg .b32 x, y, c; mov.b32 c, 0x7b807b80; "
        + two.format(bytes="0x1404", result="$0")
        + two.format(bytes="0x3424", result="$1")
        + "}",
        "=&r,=&r,r,r,r",
        word,
        *scale,
        results=2,
    )
