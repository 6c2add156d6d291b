"""Records that are missing: from host memory to their slots, by the role that fetches rows.

A warp copies a record in 16-byte pieces. The records of a block are brought before its rows are
fetched, while the other roles work on earlier blocks: the link and the matrix units run at the same
time, and no record waits for one that a later block needs.
"""

from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
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


def bring_records(missing: Missing, number: Int[Array, ""], record_bytes: int) -> None:
    """Copy the missing records of a block; afterwards every CUDA thread of the role sees them."""
    first, last = missing.before[number], missing.before[number + 1]

    def bring(turn: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        _bring(missing, first + turn * WARPS, last, record_bytes)
        return ()

    turns = lax.div(last - first + (WARPS - 1), jnp.int32(WARPS))
    lax.fori_loop(0, turns, bring, ())

    @plgpu.inline_mgpu()
    def settle(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    settle()


def _bring(
    missing: Missing, first: Int[Array, ""], last: Int[Array, ""], record_bytes: int
) -> None:
    """Up to one record per warp, from entry `first` on."""
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, SCALAR, SCALAR))
    def bring(_: Any, *operands: Any) -> None:
        host_ref, slots_ref, row_ref, target_ref, first, last = operands
        entry = arith.addi(scalar(first), arith.divui(thread_index(), integer(WARP)))
        counted = arith.cmpi(LESS, entry, scalar(last))
        at = arith.index_castui(ir.IndexType.get(), arith.select(counted, entry, scalar(first)))
        row, target = memref.load(row_ref, [at]), memref.load(target_ref, [at])
        lane = arith.muli(arith.remui(thread_index(), integer(WARP)), integer(CHUNK))
        copy = _Copy(
            source=_piece(host_ref, row, lane, record_bytes),
            target=_piece(slots_ref, target, lane, record_bytes),
            found=arith.cmpi(NOT_NEGATIVE, row, integer(0)),
            wanted=arith.andi(counted, arith.cmpi(NOT_NEGATIVE, target, integer(0))),
            lane=lane,
        )
        starts = range(0, record_bytes, WARP * CHUNK)
        for group in range(0, len(starts), IN_FLIGHT):
            _copy_pieces(copy, starts[group : group + IN_FLIGHT], record_bytes)

    bring(missing.host, missing.slots, missing.row, missing.target, first, last)


class _Copy(NamedTuple):
    """What a CUDA thread copies of a record.

    Attributes:
        source: address of its first piece in host memory.
        target: address of its first piece in device memory.
        found: whether there is such a record.
        wanted: whether there is something to write.
        lane: byte of its first piece in the record.
    """

    source: Any
    target: Any
    found: Any
    wanted: Any
    lane: Any


def _piece(pool_ref: Any, record: Any, lane: Any, record_bytes: int) -> Any:
    """Address of the thread's first piece of a record; of record 0 if there is no such."""
    safe = wide(arith.maxsi(record, integer(0)))
    start = arith.addi(address(pool_ref, 64), wide(lane))
    return arith.addi(start, arith.muli(safe, integer(record_bytes, 64)))


def _copy_pieces(copy: _Copy, starts: range, record_bytes: int) -> None:
    """Read a piece at each start, then write them; POISON for a record that does not exist."""
    pieces: list[tuple[int, Any, Any]] = []
    for start in starts:
        wanted = copy.wanted
        if start + WARP * CHUNK > record_bytes:
            inside = arith.cmpi(LESS, copy.lane, integer(record_bytes - start))
            wanted = arith.andi(wanted, inside)
        flag = arith.extui(ir.IntegerType.get_signless(32), arith.andi(wanted, copy.found))
        poison = " ".join(f"mov.b32 ${number}, {POISON};" for number in range(4))
        words = ptx(
            f"{{ .reg .pred p; setp.ne.b32 p, $5, 0; {poison} "
            "@p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=&r,=&r,=&r,=&r,l,r",
            arith.addi(copy.source, integer(start, 64)),
            flag,
            results=4,
        )
        pieces.append((start, wanted, words))
    for start, wanted, words in pieces:
        at = arith.addi(copy.target, integer(start, 64))
        ptx_if(wanted, "st.global.v4.b32 [$1], {$2, $3, $4, $5};", "l,r,r,r,r", at, *words)
