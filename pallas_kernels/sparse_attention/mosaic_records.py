"""Records that are missing: from host memory to their slots, by the role that fetches rows.

A warp copies a record in 16-byte pieces, and four warps a record each in a turn. The records of a
block are in their slots before its rows are fetched. A turn takes the link's latency, or with
others at the link much longer, so the first pieces of the next one are asked for at the end of each
and wait in registers: meanwhile the role goes on with the blocks that need nothing of it.

    blocks miss 1, 1, 0, 2, 1 records: block 0 waits for records 0-3 and asks for 4-7, blocks 1 to 3
    find theirs there, block 4 writes 4-7 to their slots, which have had the time of 4 blocks
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Int

from pallas_kernels.common.ids import POISON
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

WARP = 32
WARPS = WARPGROUP // WARP
CHUNK = 16
IN_FLIGHT = 3
"""Pieces that a CUDA thread reads before it writes the first, in 12 registers."""
WORDS = CHUNK // 4
AHEAD = plgpu.Layout.WG_STRIDED((IN_FLIGHT * WORDS * WARPGROUP,), vec_size=1)
"""Layout of the pieces that are read ahead: each CUDA thread has its own."""
LESS, NOT_NEGATIVE = arith.CmpIPredicate.ult, arith.CmpIPredicate.sge


class Missing(NamedTuple):
    """Records that a CUDA block brings.

    Attributes:
        host: the host pool.
        slots: the device slots.
        row: host row of each missing record, in the order in which the selection names them;
            NO_SLOT makes the record POISON.
        target: slot that receives each of them; NO_SLOT skips it.
        before: how many of them the blocks before each block of the part need.
    """

    host: Ref
    slots: Ref
    row: Ref
    target: Ref
    before: Ref


class Bringing(NamedTuple):
    """How far the records of a part are.

    Attributes:
        brought: records that are in their slots; those before the part count.
        ahead: first pieces of the turn after them, maybe still on their way, in AHEAD.
    """

    brought: Int[Array, ""]
    ahead: Int[Array, " pieces"]


def begin_bringing(missing: Missing, blocks: int, record_bytes: int) -> Bringing:
    """Ask for the first records of a part of so many blocks."""
    first = missing.before[0]
    return Bringing(first, _read_ahead(missing, first, missing.before[blocks], record_bytes))


def bring_records(
    missing: Missing, number: Int[Array, ""], state: Bringing, blocks: int, record_bytes: int
) -> Bringing:
    """Have the missing records of a block in their slots, for every CUDA thread of the role.

    Args:
        missing: what is to be brought.
        number: the block.
        state: of the blocks before.
        blocks: blocks of the part.
        record_bytes: bytes of a record.
    """
    last = missing.before[blocks]

    def turn(_: Int[Array, ""], state: Bringing) -> Bringing:
        _write(missing, state, last, record_bytes)
        after = state.brought + WARPS
        return Bringing(after, _read_ahead(missing, after, last, record_bytes))

    lacking = jnp.maximum(missing.before[number + 1] - state.brought, 0)
    turns = lax.div(lacking + (WARPS - 1), jnp.int32(WARPS))
    state = lax.fori_loop(0, turns, turn, state)

    @plgpu.inline_mgpu()
    def settle(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    settle()
    return state


def _read_ahead(
    missing: Missing, first: Int[Array, ""], last: Int[Array, ""], record_bytes: int
) -> Int[Array, " pieces"]:
    """Ask for the first pieces of up to one record per warp, from entry `first` on."""
    ref = plgpu.RefType()
    result = plgpu.ShapeDtypeStruct(AHEAD.args[0], jnp.int32, layout=AHEAD)

    @plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, SCALAR, SCALAR), return_type=result)
    def read(_: Any, *operands: Any) -> Any:
        copy = _copy_of(operands, record_bytes)
        words = [word for start in _starts(record_bytes)[:IN_FLIGHT] for word in _read(copy, start)]
        words += [integer(0)] * (IN_FLIGHT * WORDS - len(words))
        word = ir.VectorType.get((1,), words[0].type)
        registers = [vector.broadcast(word, each) for each in words]
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object), _layout=AHEAD.to_mgpu(), _is_signed=True
        )

    return read(missing.host, missing.slots, missing.row, missing.target, first, last)


def _write(missing: Missing, state: Bringing, last: Int[Array, ""], record_bytes: int) -> None:
    """Write the pieces that were read ahead, and copy the rest of their records."""
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, SCALAR, SCALAR, AHEAD))
    def write(_: Any, *operands: Any) -> None:
        *operands, ahead = operands
        copy, starts = _copy_of(operands, record_bytes), _starts(record_bytes)
        take = lambda each: vector.extract(each, dynamic_position=[], static_position=[0])
        words = [take(register) for register in ahead.registers.flat]
        for number, start in enumerate(starts[:IN_FLIGHT]):
            _put(copy, start, words[number * WORDS : (number + 1) * WORDS])
        for group in range(IN_FLIGHT, len(starts), IN_FLIGHT):
            pieces = [(start, _read(copy, start)) for start in starts[group : group + IN_FLIGHT]]
            for start, piece in pieces:
                _put(copy, start, piece)

    refs = missing.host, missing.slots, missing.row, missing.target
    write(*refs, state.brought, last, state.ahead)


class _Copy(NamedTuple):
    """What a CUDA thread copies of a record.

    Attributes:
        source: address of its first piece in host memory.
        target: address of its first piece in device memory.
        found: whether there is such a record.
        wanted: whether there is something to write.
        lane: byte of its first piece in the record.
        record_bytes: bytes of the record.
    """

    source: Any
    target: Any
    found: Any
    wanted: Any
    lane: Any
    record_bytes: int


def _copy_of(operands: Sequence[Any], record_bytes: int) -> _Copy:
    """What the warp copies: entry `first` and its own number on, if that is before `last`."""
    host_ref, slots_ref, row_ref, target_ref, first, last = operands
    entry = arith.addi(scalar(first), arith.divui(thread_index(), integer(WARP)))
    counted = arith.cmpi(LESS, entry, scalar(last))
    at = arith.index_castui(ir.IndexType.get(), arith.select(counted, entry, integer(0)))
    row, target = memref.load(row_ref, [at]), memref.load(target_ref, [at])
    lane = arith.muli(arith.remui(thread_index(), integer(WARP)), integer(CHUNK))
    return _Copy(
        source=_piece(host_ref, row, lane, record_bytes),
        target=_piece(slots_ref, target, lane, record_bytes),
        found=arith.cmpi(NOT_NEGATIVE, row, integer(0)),
        wanted=arith.andi(counted, arith.cmpi(NOT_NEGATIVE, target, integer(0))),
        lane=lane,
        record_bytes=record_bytes,
    )


def _starts(record_bytes: int) -> range:
    """Where a warp's pieces start in a record."""
    return range(0, record_bytes, WARP * CHUNK)


def _piece(pool_ref: Any, record: Any, lane: Any, record_bytes: int) -> Any:
    """Address of the thread's first piece of a record; of record 0 if there is no such."""
    safe = wide(arith.maxsi(record, integer(0)))
    start = arith.addi(address(pool_ref, 64), wide(lane))
    return arith.addi(start, arith.muli(safe, integer(record_bytes, 64)))


def _read(copy: _Copy, start: int) -> list[Any]:
    """The words of the thread's piece at `start`; POISON if the record does not exist."""
    flag = arith.extui(
        ir.IntegerType.get_signless(32), arith.andi(_within(copy, start), copy.found)
    )
    poison = " ".join(f"mov.b32 ${number}, {POISON};" for number in range(WORDS))
    return ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, $5, 0; {poison} "
        "@p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        arith.addi(copy.source, integer(start, 64)),
        flag,
        results=WORDS,
    )


def _put(copy: _Copy, start: int, words: Sequence[Any]) -> None:
    """Write the thread's piece at `start`."""
    at = arith.addi(copy.target, integer(start, 64))
    ptx_if(
        _within(copy, start), "st.global.v4.b32 [$1], {$2, $3, $4, $5};", "l,r,r,r,r", at, *words
    )


def _within(copy: _Copy, start: int) -> Any:
    """Whether the thread has a piece at `start` that is wanted."""
    if start + WARP * CHUNK <= copy.record_bytes:
        return copy.wanted
    inside = arith.cmpi(LESS, copy.lane, integer(copy.record_bytes - start))
    return arith.andi(copy.wanted, inside)
