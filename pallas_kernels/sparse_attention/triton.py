"""Sparse attention on a GPU: flash decoding over gathered rows, split over the selection.

One program attends with up to 64 heads of one query to one part of its selection (Dao et al.,
"Flash-Decoding", 2023). It walks over blocks of selected rows with an online softmax: a row is read
once and serves every head, as key and as value. Stages of a block: `_load_rows`, `_logits`,
`_softmax`, and the product of weights and values. Parts of a selection are merged by log-sum-exp.

Traffic: each selected row once per query that selects it, queries and values once; with more than
one part also a float32 value per part, written and read. At 64 heads the matrix units need about
two thirds of the time that the rows need, so one program per multiprocessor with the next block in
flight is enough: a block of 64 rows of 1,152 bytes is more than the latency of device memory asks
for. Rows are read as 512 + 64 numbers, so no power-of-two block pads them.

What bounds it: with 64 heads Triton gives every warp to the rows of a product from which another
follows, so both warpgroups compute all logits. Putting the softmax into a branch avoids that in
plain Triton, but takes more shared memory than there is in the one that XLA carries. On an H200,
128 requests, 64 heads, K 2048: 188 us against 82 us for the bytes; blocks of 32 rows 247 us, 4
warps 433 us, two parts per selection 210 us.

What would have to change when Pallas-Triton goes: the same loop on Mosaic GPU, rows by TMA gather.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.common.typed_view import typed_view

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
MOST_HEADS = 64
"""Heads of a program. Accumulators of more would not fit into the registers."""
MOST_VALUES = {2: 512, 4: 128}
"""Value numbers of a row by bytes of a query number: float32 operands have to fit in registers."""
MOST_REST = 128
"""Numbers of a row after the value."""
LEAST_SIDE = 16
"""Least rows and columns of a matrix operand."""
MULTIPROCESSORS = 132
"""Of an H200. Selections are split until there are about as many programs."""
LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
        block: selected rows per step of a program.
        warps: warps of a program.
        stages: depth of the software pipeline. Slot ids are read two blocks ahead and rows one, so
            one block of rows is in flight with 3 or 4 stages, two with 5.
        splits: parts of a selection, each a program of its own.
    """

    block: int = 64
    warps: int = 8
    stages: int = 3
    splits: int = 1


def default_tuning(programs: int, top_k: int, itemsize: int) -> Tuning:
    """The tuning for so many programs of one part, and `itemsize` bytes per query number."""
    longest = 64 if itemsize == 2 else LEAST_SIDE
    block = min(longest, _side(top_k))
    splits = 1
    while programs * 2 * splits <= MULTIPROCESSORS and top_k >= 4 * splits * block:
        splits *= 2
    return Tuning(block=block, warps=8 if itemsize == 2 else 4, splits=splits)


def supports(
    query: Float[Array, "R T H width"], *, row_dtype: DTypeLike, value_width: int
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    for what, dtype in (("queries", query.dtype), ("rows", jnp.dtype(row_dtype))):
        if dtype not in DTYPES:
            return f"{what} of {dtype} (only float32 and bfloat16)"
    most = MOST_VALUES[query.dtype.itemsize]
    if _side(value_width) > most:
        return f"{query.dtype} values of {value_width} numbers (at most {most})"
    rest = query.shape[-1] - value_width
    if rest > MOST_REST:
        return f"rows with {rest} numbers after the value (at most {MOST_REST})"
    return None


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S W"],
    location: Int[Array, "R T K"],
    *,
    offset: int,
    row_dtype: DTypeLike,
    value_width: int,
    scale: float,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """See `api.sparse_attention`. `interpret` runs the kernel as plain XLA operations."""
    requests, queries, heads, width = query.shape
    flat = query.reshape(-1, heads, width)
    head_block = min(MOST_HEADS, _side(heads))
    if tuning is None:
        programs = len(flat) * pl.cdiv(heads, head_block)
        tuning = default_tuning(programs, location.shape[-1], query.dtype.itemsize)
    spec = Spec(
        row=RowSpec(
            start=offset * WORD_BYTES // jnp.dtype(row_dtype).itemsize,
            value=value_width,
            rest=width - value_width,
        ),
        heads=head_block,
        block=tuning.block,
        scale=scale * LOG2_E,
    )
    rows = typed_view(slots, row_dtype, interpret=interpret)
    ids = _in_parts(location.reshape(len(flat), -1), tuning)
    values, lse = _attend_parts(_padded_heads(flat, head_block), rows, ids, spec, tuning, interpret)
    values, lse = _merge(values, lse)
    shape = (requests, queries, heads)
    values = values[:, :heads].astype(query.dtype).reshape(*shape, value_width)
    return values, lse[:, :heads].reshape(shape)


def _side(size: int) -> int:
    """The matrix side that holds `size` rows or columns."""
    return max(LEAST_SIDE, pl.next_power_of_2(size))


def _padded_heads(
    query: Float[Array, "N H width"], head_block: int
) -> Float[Array, "N heads width"]:
    """Whole blocks of heads; with 64 heads there is nothing to add."""
    return jnp.pad(query, ((0, 0), (0, -query.shape[1] % head_block), (0, 0)))


def _in_parts(location: Int[Array, "N K"], tuning: Tuning) -> Int[Array, "N splits part"]:
    """The selection in equal parts of whole blocks, filled up with NO_SLOT."""
    pad = -location.shape[1] % (tuning.splits * tuning.block)
    filled = jnp.pad(location, ((0, 0), (0, pad)), constant_values=NO_SLOT)
    return filled.reshape(len(location), tuning.splits, -1)


class RowSpec(NamedTuple):
    """Where a row is in its record, in numbers: `value` numbers, then `rest` more."""

    start: int
    value: int
    rest: int


class Spec(NamedTuple):
    """What is static in a kernel.

    Attributes:
        row: where rows are.
        heads: heads of a program.
        block: selected rows of a step.
        scale: of the logits, in powers of two.
    """

    row: RowSpec
    heads: int
    block: int
    scale: float


def _attend_parts(
    query: Float[Array, "N H width"],
    rows: Float[Array, "S numbers"],
    location: Int[Array, "N splits part"],
    spec: Spec,
    tuning: Tuning,
    interpret: bool,
) -> tuple[Float[Array, "N splits H value"], Float[Array, "N splits H"]]:
    """Normalised values and log-sum-exp of every part; float32 if there are several."""
    count, heads, _ = query.shape
    splits = location.shape[1]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_attend_kernel, spec=spec),
        grid=(count, heads // spec.heads, splits),
        in_specs=[whole] * 3,
        out_specs=[whole] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(
                (count, splits, heads, spec.row.value),
                query.dtype if splits == 1 else jnp.float32,
            ),
            jax.ShapeDtypeStruct((count, splits, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="sparse_attention",
    )
    return call(query, location, rows)


def _merge(
    values: Float[Array, "N splits H value"], lse: Float[Array, "N splits H"]
) -> tuple[Float[Array, "N H value"], Float[Array, "N H"]]:
    """The parts of every selection as one, each weighted by what its rows sum up to."""
    if lse.shape[1] == 1:
        return values[:, 0], lse[:, 0]
    peak = jnp.maximum(lse.max(axis=1, keepdims=True), LOWEST)
    weights = jnp.exp(lse - peak)
    total = weights.sum(axis=1)
    merged = (weights[..., None] * values).sum(axis=1)
    found = total > 0.0
    merged = jnp.where(found[..., None], merged / jnp.where(found, total, 1.0)[..., None], 0.0)
    return merged, peak[:, 0] + jnp.log(total)


class Softmax(NamedTuple):
    """Online softmax of a program, in powers of two.

    Attributes:
        peak: largest logit so far.
        total: sum of the weights so far, relative to the peak.
    """

    peak: Float[Array, " heads"]
    total: Float[Array, " heads"]


def _attend_kernel(
    query_ref: jax.Ref,
    location_ref: jax.Ref,
    rows_ref: jax.Ref,
    values_ref: jax.Ref,
    lse_ref: jax.Ref,
    *,
    spec: Spec,
) -> None:
    """One part of one query's selection for one block of heads."""
    program, part = pl.program_id(0), pl.program_id(2)
    heads = pl.program_id(1) * spec.heads + jnp.arange(spec.heads, dtype=jnp.int32)
    queries = _load_query(query_ref, program, heads, spec.row)

    def step(
        number: Int[Array, ""], carry: tuple[Softmax, Float[Array, "heads value"]]
    ) -> tuple[Softmax, Float[Array, "heads value"]]:
        softmax, values = carry
        place = number * spec.block + jnp.arange(spec.block, dtype=jnp.int32)
        slot = plgpu.load(location_ref.at[program, part, place])
        rows = _load_rows(rows_ref, slot, spec.row, queries[0].dtype)
        logits = _logits(queries, rows, slot >= 0, spec.scale)
        weights, correction, softmax = _softmax(logits, softmax)
        weighted = _dot(weights.astype(rows[0].dtype), rows[0])
        return softmax, values * correction[:, None] + weighted

    nothing = Softmax(jnp.full(spec.heads, LOWEST), jnp.zeros(spec.heads))
    start = nothing, jnp.zeros((spec.heads, _side(spec.row.value)))
    blocks = location_ref.shape[2] // spec.block
    softmax, values = lax.fori_loop(0, blocks, step, start)
    _store(values_ref, lse_ref, softmax, values, (program, part, heads), spec.row)


def _load_query(
    ref: jax.Ref, program: Int[Array, ""], heads: Int[Array, " heads"], row: RowSpec
) -> list[Float[Array, "heads _"]]:
    """The queries of the heads in the parts of a row."""
    return [
        plgpu.load(
            ref.at[program, heads[:, None], column[None]],
            mask=mask,
            other=None if mask is None else 0.0,
        )
        for column, mask in _parts(row._replace(start=0))
    ]


def _load_rows(
    ref: jax.Ref, slot: Int[Array, " block"], row: RowSpec, dtype: jnp.dtype
) -> list[Float[Array, "block _"]]:
    """The selected rows in their parts; zeros for NO_SLOT, whose slot is not read."""
    live = (slot >= 0)[:, None]
    safe = jnp.where(live, slot[:, None], 0)
    return [
        plgpu.load(
            ref.at[safe, column[None]], mask=live if mask is None else live & mask, other=0.0
        ).astype(dtype)
        for column, mask in _parts(row)
    ]


def _parts(row: RowSpec) -> list[tuple[Int[Array, " _"], Bool[Array, "1 _"] | None]]:
    """Columns of value and rest, padded to matrix sides, and which of them are real: None if all.

    In: start 0, value 512, rest 64. Out: columns 0-511 and 512-575, both without a mask.
    In: start 0, value 12, rest 3. Out: columns 0-15 with 12 real ones, 12-27 with 3.
    """
    parts = []
    for start, size in ((row.start, row.value), (row.start + row.value, row.rest)):
        if size:
            column = jnp.arange(_side(size), dtype=jnp.int32)
            mask = None if _side(size) == size else (column < size)[None]
            parts.append((start + column, mask))
    return parts


def _logits(
    queries: list[Float[Array, "heads _"]],
    rows: list[Float[Array, "block _"]],
    live: Bool[Array, " block"],
    scale: float,
) -> Float[Array, "heads block"]:
    """Scaled products of queries and rows; -inf for NO_SLOT."""
    logits = scale * sum(_dot(query, row.T) for query, row in zip(queries, rows, strict=True))
    return jnp.where(live[None], logits, -jnp.inf)


def _softmax(
    logits: Float[Array, "heads block"], softmax: Softmax
) -> tuple[Float[Array, "heads block"], Float[Array, " heads"], Softmax]:
    """Weights of the block, the correction of earlier sums, and the softmax that includes it."""
    peak = jnp.maximum(softmax.peak, logits.max(axis=1))
    weights = jnp.exp2(logits - peak[:, None])
    correction = jnp.exp2(softmax.peak - peak)
    return weights, correction, Softmax(peak, softmax.total * correction + weights.sum(axis=1))


def _store(
    values_ref: jax.Ref,
    lse_ref: jax.Ref,
    softmax: Softmax,
    values: Float[Array, "heads value"],
    where: tuple[Int[Array, ""], Int[Array, ""], Int[Array, " heads"]],
    row: RowSpec,
) -> None:
    """Write normalised values and the log-sum-exp; zeros and -inf if nothing is selected."""
    program, part, heads = where
    found = softmax.total > 0.0
    total = jnp.where(found, softmax.total, 1.0)
    lse = jnp.where(found, (softmax.peak + jnp.log2(total)) / LOG2_E, -jnp.inf)
    plgpu.store(lse_ref.at[program, part, heads], lse)
    column, mask = _parts(RowSpec(0, row.value, 0))[0]
    plgpu.store(
        values_ref.at[program, part, heads[:, None], column[None]],
        (values / total[:, None]).astype(values_ref.dtype),
        mask=mask,
    )


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """A product in float32; exact for float32 operands, which Triton would round to tf32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32)
