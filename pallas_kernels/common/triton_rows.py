"""Moving whole records by index in a Pallas-Triton kernel: what `retrieve` and `backup` share.

A program holds some records in registers: all of their loads are in flight before the first store.
A record is one contiguous run, cut into pieces whose widths are powers of two, as Triton wants them
(672 words are 512 + 128 + 32), so that no lane idles and a lane moves 16 bytes at a time. Offsets
are 64 bit where an array needs it: `ref.at` computes them so from 2**32 bytes on.

What would have to change when Pallas-Triton goes: the same loops with TMA copies of Mosaic GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT, POISON, in_range

WARP = 32
LANE_WORDS = 32
"""Words that a lane holds at most, so that the registers do not limit the programs in flight."""

Record = list[jax.Array]
"""The pieces of some records: `[records, width of the piece]` each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut.

    Attributes:
        records: records that a program moves at a time, a power of two: their loads are all in
            flight together, `records * words / (32 * warps)` words per lane.
        warps: warps of a program.
        programs: programs that walk the lists of a retrieval together, as many as an H200 holds; a
            backup has one for each run of records.
    """

    records: int
    warps: int
    programs: int


def default_tuning(words: int) -> Tuning:
    """The tuning for records of so many words.

    Lanes that find nothing to do in a narrow piece read what another lane reads, so records that
    end in a narrow piece (656 bytes do) get programs of one warp.
    """
    warps = 4 if words % WARP == 0 else 1
    fit = max(1, WARP * warps * LANE_WORDS // words)
    return Tuning(records=1 << fit.bit_length() - 1, warps=warps, programs=132 * 32 // warps)


def pieces(words: int) -> list[tuple[int, int]]:
    """Start and width of the pieces of a record, widest first.

    In:  164
    Out: [(0, 128), (128, 32), (160, 4)]
    """
    widths = [1 << bit for bit in reversed(range(words.bit_length())) if words >> bit & 1]
    return [(sum(widths[:number]), width) for number, width in enumerate(widths)]


def load_records(ref: jax.Ref, rows: Int[Array, " records"]) -> Record:
    """Records `rows` of `ref`; those that `ref` does not have are POISON and not read."""
    found = in_range(rows, ref.shape[0])[:, None]
    safe = jnp.where(found, rows[:, None], 0)
    return [
        plgpu.load(ref.at[safe, columns], mask=_wide(found, columns), other=POISON)
        for columns in _columns(ref.shape[1])
    ]


def store_records(
    ref: jax.Ref, places: Int[Array, " records"], records: Record, live: Bool[Array, " records"]
) -> None:
    """Write records to `places` of `ref` where live and where there is such a place.

    What is not written goes past the end: interpret mode has no masks, but drops such an index.
    """
    live = (live & in_range(places, ref.shape[0]))[:, None]
    safe = jnp.where(live, places[:, None], ref.shape[0])
    for columns, words in zip(_columns(ref.shape[1]), records, strict=True):
        plgpu.store(ref.at[safe, columns], words, mask=_wide(live, columns))


def load_ids(
    ref: jax.Ref, place: tuple[jax.Array, ...], live: Bool[Array, " records"]
) -> Int[Array, " records"]:
    """`ref[place]` where live, else NO_SLOT."""
    safe = (jnp.where(live, index, 0) for index in place)
    return plgpu.load(ref.at[*safe], mask=live, other=NO_SLOT)


def _columns(words: int) -> list[Int[Array, "1 width"]]:
    return [start + jnp.arange(width, dtype=jnp.int32)[None] for start, width in pieces(words)]


def _wide(mask: Bool[Array, "records 1"], columns: Int[Array, "1 width"]) -> Bool[Array, "..."]:
    return jnp.broadcast_to(mask, (mask.shape[0], columns.shape[1]))
