"""What sparse attention on Hopper works on: operands in whole blocks, and how the work is cut."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.common.scaled_rows import ScaledRow

HEADS = 64
"""Heads of a CUDA block: the rows of a matrix product. Fewer are padded."""
BLOCK = 64
"""Rows of a block."""
TILE = 64
"""Numbers of a row in a tile of shared memory."""
CHUNK = 16
"""Bytes that a CUDA thread moves at once."""
MOST_WIDTH = 576
"""Numbers of a row: two blocks of longer rows do not fit into shared memory."""
MULTIPROCESSORS = 132
"""Of an H200. Selections are split until there are about as many CUDA blocks."""
LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut: parts of a selection, each a CUDA block of its own."""

    splits: int = 1


def default_tuning(programs: int, top_k: int) -> Tuning:
    """The tuning for so many CUDA blocks of one part."""
    splits = 1
    while programs * 2 * splits <= MULTIPROCESSORS and top_k >= 4 * splits * BLOCK:
        splits *= 2
    return Tuning(splits)


class Registers(NamedTuple):
    """Registers of a CUDA thread in each role; 2 sum + weigh + fetch is at most 512."""

    fetch: int
    weigh: int
    sum: int


COPYING = Registers(fetch=64, weigh=112, sum=168)
EXPANDING = Registers(fetch=72, weigh=104, sum=168)


def supports(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S *W"],
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    width = query.shape[-1]
    if query.dtype != jnp.bfloat16:
        return f"queries of {query.dtype} (only bfloat16)"
    if not isinstance(row_format, ScaledRow):
        if jnp.dtype(row_format) != jnp.bfloat16:
            return f"rows of {jnp.dtype(row_format)} (only bfloat16 and scaled rows)"
    elif row_format.numbers != "e4m3" or row_format.scale == "e4m3":
        return f"{row_format} (only 8-bit numbers with float32 or e8m0 scales)"
    elif row_format.quantised % TILE or row_format.rest != TILE:
        return f"{row_format} (quantised numbers in whole tiles of {TILE}, and {TILE} others)"
    if width > MOST_WIDTH:
        return f"rows of {width} numbers (at most {MOST_WIDTH})"
    for what, start in (("row", offset), ("record", slots.shape[1])):
        if start * WORD_BYTES % CHUNK:
            return f"a {what} that starts at {start * WORD_BYTES} bytes (only multiples of {CHUNK})"
    if width * 2 % CHUNK and not isinstance(row_format, ScaledRow):
        return f"rows of {width * 2} bytes (only multiples of {CHUNK})"
    return None


class Rows(NamedTuple):
    """Where a row is in its record.

    Attributes:
        record_bytes: from one record to the next.
        offset: first byte of the row in a record; a multiple of 16.
        width: numbers of a row.
        scaled: the format, if the row is not just bfloat16.
    """

    record_bytes: int
    offset: int
    width: int
    scaled: ScaledRow | None

    @property
    def tiles(self) -> int:
        """Tiles that hold a row."""
        return -(-self.width // TILE)


class Spec(NamedTuple):
    """What is static in a kernel.

    Attributes:
        rows: where rows are.
        columns: columns of values, in whole tiles for two warpgroups.
        scale: of the logits, in powers of two.
        blocks: blocks of a part.
        registers: of each role.
        sinks: whether the first part starts with a sink.
        bring: whether missing records are brought from the host meanwhile.
    """

    rows: Rows
    columns: int
    scale: float
    blocks: int
    registers: Registers
    sinks: bool
    bring: bool = False


class Work(NamedTuple):
    """Operands of the kernel.

    Attributes:
        query: queries in whole blocks of heads and whole tiles.
        location: selections in parts of whole blocks.
        starts: logit of each head's sink in powers of two; lowest without one.
        spec: what is static.
    """

    query: Float[Array, "N blocks heads width"]
    location: Int[Array, "N splits part"]
    starts: Float[Array, "blocks heads"]
    spec: Spec


def prepare(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S W"],
    location: Int[Array, "R T K"],
    sinks: Float[Array, " H"] | None,
    tuning: Tuning | None,
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
) -> Work:
    """Operands of the kernel; see `api.sparse_attention`."""
    requests, queries, heads, width = query.shape
    count, head_blocks = requests * queries, -(-heads // HEADS)
    tuning = tuning or default_tuning(count * head_blocks, location.shape[-1])
    ids = _in_parts(location.reshape(count, -1), tuning.splits)
    scaled = row_format if isinstance(row_format, ScaledRow) else None
    spec = Spec(
        rows=Rows(slots.shape[1] * WORD_BYTES, offset * WORD_BYTES, width, scaled),
        columns=-(-value_width // (2 * TILE)) * 2 * TILE,
        scale=scale * LOG2_E,
        blocks=ids.shape[2] // BLOCK,
        registers=COPYING if scaled is None else EXPANDING,
        sinks=sinks is not None,
    )
    padded = _padded_queries(query.reshape(count, heads, width), spec.rows.tiles * TILE)
    starts = jnp.full(heads, LOWEST) if sinks is None else sinks.astype(jnp.float32) * LOG2_E
    starts = jnp.pad(starts, (0, head_blocks * HEADS - heads)).reshape(head_blocks, HEADS)
    return Work(padded, ids, starts, spec)


def attended(
    query: Float[Array, "R T H width"],
    value_width: int,
    values: Float[Array, "N blocks splits heads columns"],
    lse: Float[Array, "N blocks splits heads"],
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """What the parts come to, in the shapes of the operation."""
    values, lse = _merge(values, lse)
    shape, count = query.shape[:3], len(values)
    values = values.reshape(count, -1, values.shape[-1])[:, : shape[2], :value_width]
    lse = lse.reshape(count, -1)[:, : shape[2]]
    return values.astype(query.dtype).reshape(*shape, value_width), lse.reshape(shape)


def _in_parts(location: Int[Array, "N K"], splits: int) -> Int[Array, "N splits part"]:
    """The selection in equal parts of whole blocks, filled up with NO_SLOT."""
    pad = -location.shape[1] % (splits * BLOCK)
    filled = jnp.pad(location, ((0, 0), (0, pad)), constant_values=NO_SLOT)
    return filled.reshape(len(location), splits, -1)


def _padded_queries(
    query: Float[Array, "N H width"], width: int
) -> Float[Array, "N blocks heads width"]:
    """Whole blocks of heads and whole tiles; with the sizes of GLM there is nothing to add."""
    count, heads, numbers = query.shape
    more = -heads % HEADS
    padded = jnp.pad(query, ((0, 0), (0, more), (0, width - numbers)))
    return padded.reshape(count, -1, HEADS, width)


def _merge(
    values: Float[Array, "N blocks splits heads value"],
    lse: Float[Array, "N blocks splits heads"],
) -> tuple[Float[Array, "N blocks heads value"], Float[Array, "N blocks heads"]]:
    """The parts of every selection as one, each weighted by what its rows sum up to."""
    if lse.shape[2] == 1:
        return values[:, :, 0], lse[:, :, 0]
    peak = jnp.maximum(lse.max(axis=2, keepdims=True), LOWEST)
    weights = jnp.exp(lse - peak)
    total = weights.sum(axis=2)
    merged = (weights[..., None] * values).sum(axis=2)
    found = total != 0.0
    merged = jnp.where(found[..., None], merged / jnp.where(found, total, 1.0)[..., None], 0.0)
    return merged, peak[:, :, 0] + jnp.log(total)
