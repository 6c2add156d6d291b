"""Sparse attention on a Hopper GPU: flash decoding over gathered rows, one role per warpgroup.

A CUDA block attends with 64 heads of one query to one part of its selection (Dao et al.,
"Flash-Decoding", 2023), in blocks of 64 rows. Its warpgroups work on different blocks at a time:

    fetch   selected rows -> shared memory, as bfloat16       (`mosaic_rows`; two stages in flight)
    weigh   logits = queries x rows, online softmax           -> weights, and a factor per head
    sum     values = values * factor + weights x rows         two of them, half of the columns each

A row is read once and serves every head, as key and as value. The weights and the factors by which
earlier sums shrink go through shared memory, so logits are computed once and no warpgroup holds
more than half of the values: that is what Triton cannot express, where both warpgroups computed all
logits. Parts of a selection are merged by log-sum-exp.

Traffic: each selected row once per query that selects it (from L2 if another query of the request
has just read it), queries and values once; with more than one part also a float32 value per part.
With 64 heads the products take 46 us of the 80 us that the rows of 128 requests take.

What bounds it: one query per request, memory. More queries, the chain of `weigh`: 36 products of
64 x 64 x 16 that read both operands from shared memory, then a softmax by a single warpgroup.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.mosaic import Ref, kernel, load, params
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.sparse_attention.mosaic_records import Missing, bring_records
from pallas_kernels.sparse_attention.mosaic_rows import (
    TRANSFORMS,
    Stage,
    fill_stage,
    init_arrivals,
    load_slots,
    wait_arrival,
)
from pallas_kernels.sparse_attention.mosaic_work import (
    BLOCK,
    HEADS,
    LOG2_E,
    LOWEST,
    Spec,
    Tuning,
    Work,
    attended,
    prepare,
)
from pallas_kernels.sparse_attention.mosaic_work import supports as supports

STAGES = 2
PIECE = 128
"""Columns of an accumulator: one of 256 takes more registers than four warpgroups start with."""
STARTING = 128
"""Registers with which every CUDA thread of four warpgroups starts."""
BY_HEAD = plgpu.Layout.WGMMA.reduce(1)
BY_ROW = plgpu.Layout.WGMMA.reduce(0)


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S W"],
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
    options = {"offset": offset, "row_format": row_format, "value_width": value_width}
    work = prepare(query, slots, location, sinks, tuning, scale=scale, **options)
    return attended(query, value_width, *_attend_parts(work, slots))


class Brought(NamedTuple):
    """What is brought from the host, per request in the order in which blocks need it.

    Attributes:
        host: the host pool, typed as device memory.
        rows: host row of each record; NO_SLOT makes it POISON.
        targets: slot of each record; NO_SLOT skips it.
        before: how many of them the blocks before each block need; at the end all.
    """

    host: Int[Array, "N W"]
    rows: Int[Array, "R U"]
    targets: Int[Array, "R U"]
    before: Int[Array, "R blocks"]


def retrieve_attend(
    query: Float[Array, "R 1 H width"],
    slots: Int[Array, "S W"],
    location: Int[Array, "R 1 K"],
    brought: Brought,
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
    tuning: Tuning | None = None,
) -> tuple[tuple[Float[Array, "R 1 H value"], Float[Array, "R 1 H"]], Int[Array, "S W"]]:
    """See `pallas_kernels.retrieve_attend.api`: the same kernel, which also brings the missing."""
    options = {"offset": offset, "row_format": row_format, "value_width": value_width}
    work = prepare(query, slots, location, None, tuning, scale=scale, **options)
    splits, part = work.location.shape[1:]
    more = splits * part // BLOCK + 1 - brought.before.shape[1]
    before = jnp.pad(brought.before, ((0, 0), (0, more)), mode="edge")
    work = work._replace(spec=work.spec._replace(bring=True))
    pool = jax.new_ref(slots)
    parts = _attend_parts(work, pool, *brought._replace(before=before))
    return attended(query, value_width, *parts), jax.freeze(pool)


def _attend_parts(
    work: Work,
    slots: Ref,
    *missing: Int[Array, "..."],
) -> tuple[Float[Array, "N blocks splits heads columns"], Float[Array, "N blocks splits heads"]]:
    """Normalised values and log-sum-exp of every part; float32 if there are several."""
    count, head_blocks, _, width = work.query.shape
    spec, splits = work.spec, work.location.shape[1]
    parts = (count, head_blocks, splits, HEADS)
    dtype = jnp.bfloat16 if splits == 1 else jnp.float32
    call = kernel(
        functools.partial(_attend_kernel, spec=spec),
        out=[
            jax.ShapeDtypeStruct((*parts, spec.columns), dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        scratch={
            "query_smem": plgpu.SMEM((HEADS, width), jnp.bfloat16, transforms=TRANSFORMS),
            "rows_smem": plgpu.SMEM((STAGES, BLOCK, width), jnp.bfloat16, transforms=TRANSFORMS),
            "weights_smem": plgpu.SMEM((HEADS, BLOCK), jnp.bfloat16, transforms=TRANSFORMS),
            # Factors, mbarriers, slots of the stages: an array each would take a kilobyte each.
            "small_smem": plgpu.SMEM((2 + STAGES, BLOCK), jnp.float32),
            "query_ready": plgpu.Barrier(num_arrivals=1),
            "rows_free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "weights_ready": plgpu.Barrier(num_arrivals=1),
            "weights_free": plgpu.Barrier(num_arrivals=2),
        },
        mesh=plgpu.Mesh(
            grid=(count, head_blocks, splits),
            grid_names=("query", "heads", "part"),
            num_threads=4,
            thread_name="role",
        ),
        compiler_params=params(approx_math=True, reduction_scratch_bytes=256),
        name="retrieve_attend" if spec.bring else "sparse_attention",
    )
    return call(work.query, slots, work.location, work.starts, *missing)


class Memory(NamedTuple):
    """Scratch memory of a CUDA block, and what guards it. The names are those of `_attend_parts`.

    Attributes:
        query_smem: the queries of 64 heads.
        rows_smem: blocks of rows, one per stage.
        weights_smem: softmax weights of one block of rows.
        small_smem: `factor`, `arrived`, `slot`.
        query_ready: the queries are there.
        rows_free: both halves are summed: the stage may be filled again.
        weights_ready: weights and factors are there.
        weights_free: they have been used.
    """

    query_smem: Any
    rows_smem: Any
    weights_smem: Any
    small_smem: Any
    query_ready: Any
    rows_free: Any
    weights_ready: Any
    weights_free: Any

    @property
    def factor(self) -> Ref:
        """What each head's sums are multiplied with before more is added; at the end 1 / total."""
        return self.small_smem.at[0]

    @property
    def arrived(self) -> Ref:
        """mbarriers: a stage is filled."""
        return self.small_smem.at[1]

    def slot(self, stage: Int[Array, ""]) -> Ref:
        """Slots of the rows in a stage, as bits: those that are NO_SLOT are masked."""
        return self.small_smem.at[2 + stage]


def _attend_kernel(
    query_ref: Ref,
    slots_ref: Ref,
    location_ref: Ref,
    starts_ref: Ref,
    *refs: Ref,
    spec: Spec,
    **scratch: Any,
) -> None:
    """One part of one query's selection for one block of heads."""
    query, heads, part = (lax.axis_index(name) for name in ("query", "heads", "part"))
    role = lax.axis_index("role")
    memory = Memory(**scratch)
    *lists, values_ref, lse_ref = refs
    location = location_ref.at[query, part]
    out = (values_ref.at[query, heads, part], lse_ref.at[query, heads, part])

    @pl.when(role == 3)
    def _fetch_role() -> None:
        _take_registers(spec.registers.fetch)
        init_arrivals(memory.arrived, STAGES)
        plgpu.copy_gmem_to_smem(query_ref.at[query, heads], memory.query_smem, memory.query_ready)
        _fetch(slots_ref, location, _missing(slots_ref, lists, query, part, spec), memory, spec)

    @pl.when(role == 2)
    def _weigh_role() -> None:
        _take_registers(spec.registers.weigh)
        plgpu.barrier_wait(memory.query_ready)
        _weigh(starts_ref.at[heads], out[1], memory, spec, part)

    for half in range(2):

        @pl.when(role == half)
        def _sum_role(half: int = half) -> None:
            _take_registers(spec.registers.sum)
            _sum(half, out[0], memory, spec)


def _take_registers(count: int) -> None:
    plgpu.set_max_registers(count, action="increase" if count > STARTING else "decrease")


def _block(ref: Ref, number: Int[Array, ""]) -> Ref:
    return ref.at[pl.ds(number * BLOCK, BLOCK)]


def _missing(
    slots_ref: Ref, lists: list[Ref], query: jax.Array, part: jax.Array, spec: Spec
) -> Missing | None:
    """What is to be brought for a part of a query's selection, if anything ever is."""
    if not spec.bring:
        return None
    host_ref, *refs = lists
    rows, targets, before = (ref.at[query] for ref in refs)
    mine = before.at[pl.ds(part * spec.blocks, spec.blocks + 1)]
    return Missing(host_ref, slots_ref, rows, targets, mine)


def _fetch(
    slots_ref: Ref, location_ref: Ref, missing: Missing | None, memory: Memory, spec: Spec
) -> None:
    """Fill one stage after the other. Slots are read a block ahead."""
    block = lambda number: _block(location_ref, jnp.minimum(number, spec.blocks - 1))

    def fetch_block(number: Int[Array, ""], ids: Int[Array, " ids"]) -> Int[Array, " ids"]:
        stage = lax.rem(number, STAGES)
        later = load_slots(block(number + 1))
        if missing:
            bring_records(missing, number, spec.rows.record_bytes)

        @pl.when(number >= STAGES)
        def _wait_until_free() -> None:
            plgpu.barrier_wait(memory.rows_free.at[stage])

        target = Stage(memory.rows_smem.at[stage], memory.slot(stage), memory.arrived)
        fill_stage(slots_ref, block(number), (ids, later), target, stage, spec.rows)
        return later

    lax.fori_loop(0, spec.blocks, fetch_block, load_slots(block(jnp.int32(0))))


class Softmax(NamedTuple):
    """Online softmax of 64 heads, in powers of two.

    Attributes:
        peak: largest logit so far.
        total: sum of the weights so far, relative to the peak.
    """

    peak: Float[Array, " heads"]
    total: Float[Array, " heads"]


def _weigh(
    starts_ref: Ref,
    lse_ref: Ref,
    memory: Memory,
    spec: Spec,
    part: Int[Array, ""],
) -> None:
    """Logits and softmax of every block; at the end the factor that normalises the values."""

    def weigh_block(number: Int[Array, ""], softmax: Softmax) -> Softmax:
        stage = lax.rem(number, STAGES)
        wait_arrival(memory.arrived, stage, lax.rem(lax.div(number, STAGES), 2))
        slot = lax.bitcast_convert_type(load(memory.slot(stage), BY_ROW), jnp.int32)
        logits = _logits(memory.query_smem, memory.rows_smem.at[stage], slot, spec.scale)
        weights, factor, softmax = _softmax(logits, softmax)

        @pl.when(number > 0)
        def _wait_until_used() -> None:
            plgpu.barrier_wait(memory.weights_free)

        memory.weights_smem[...] = weights.astype(jnp.bfloat16)
        _hand_over(factor, memory)
        return softmax

    start = _start(starts_ref, spec, part)
    softmax = lax.fori_loop(0, spec.blocks, weigh_block, start)
    found = softmax.total != 0.0  # also if it is NaN, which must not look like an empty sum
    total = jnp.where(found, softmax.total, 1.0)
    plgpu.barrier_wait(memory.weights_free)
    _hand_over(1.0 / total, memory)
    lse_ref[...] = jnp.where(found, softmax.peak * (1 / LOG2_E) + jnp.log(total), -jnp.inf)


def _start(starts_ref: Ref, spec: Spec, part: Int[Array, ""]) -> Softmax:
    """An empty softmax; in the first part, with the sinks as if a row of zeros had those logits."""
    one = jnp.where(part == 0, 1.0, 0.0) if spec.sinks else 0.0
    peak = load(starts_ref, BY_HEAD)
    if spec.sinks:
        peak = jnp.where(part == 0, peak, LOWEST)
    total = plgpu.layout_cast(jnp.full((HEADS,), one, jnp.float32), BY_HEAD)
    return Softmax(peak, total)


def _logits(
    query_smem: Ref, rows_smem: Ref, slot: Int[Array, " rows"], scale: float
) -> Float[Array, "heads rows"]:
    """Scaled products of queries and rows; -inf for NO_SLOT."""

    def multiply(products: Ref) -> Float[Array, "heads rows"]:
        plgpu.wgmma(products, query_smem, rows_smem.transpose((1, 0)))
        return products[...]

    products = pl.run_scoped(multiply, plgpu.ACC((HEADS, BLOCK), jnp.float32))
    mask = jnp.where(slot >= 0, 0.0, -jnp.inf)
    return products * scale + lax.broadcast_in_dim(mask, products.shape, [1])


def _softmax(
    logits: Float[Array, "heads rows"], softmax: Softmax
) -> tuple[Float[Array, "heads rows"], Float[Array, " heads"], Softmax]:
    """Weights of the block, the factor of earlier sums, and the softmax that includes it."""
    peak = jnp.maximum(softmax.peak, logits.max(axis=1))
    weights = jnp.exp2(logits - lax.broadcast_in_dim(peak, logits.shape, [0]))
    factor = jnp.exp2(softmax.peak - peak)
    return weights, factor, Softmax(peak, softmax.total * factor + weights.sum(axis=1))


def _hand_over(factor: Float[Array, " heads"], memory: Memory) -> None:
    """Tell both halves that weights and factors are there."""
    memory.factor[...] = factor
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.weights_ready)


def _sum(half: int, values_ref: Ref, memory: Memory, spec: Spec) -> None:
    """Weighted sums of half of the columns, in accumulators of `PIECE` columns."""
    width = spec.columns // 2
    size = min(PIECE, width)
    pieces = [pl.ds(half * width + at, size) for at in range(0, width, size)]

    def sum_block(number: Int[Array, ""], sums: list[jax.Array]) -> list[jax.Array]:
        stage = lax.rem(number, STAGES)
        plgpu.barrier_wait(memory.weights_ready)

        def add(sum_refs: list[Ref]) -> None:
            for ref, piece in zip(sum_refs, pieces, strict=True):
                plgpu.wgmma(ref, memory.weights_smem, memory.rows_smem.at[stage, :, piece])

        start: Any = [plgpu.ACC.init(each) for each in _scaled(sums, memory)]
        sums = pl.run_state(add)(start)
        plgpu.barrier_arrive(memory.rows_free.at[stage])
        plgpu.barrier_arrive(memory.weights_free)
        return sums

    nothing = plgpu.layout_cast(jnp.zeros((HEADS, size), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(0, spec.blocks, sum_block, [nothing for _ in pieces])
    plgpu.barrier_wait(memory.weights_ready)
    for piece, each in zip(pieces, _scaled(sums, memory), strict=True):
        values_ref[:, piece] = each.astype(values_ref.dtype)


def _scaled(sums: list[jax.Array], memory: Memory) -> list[jax.Array]:
    factor = load(memory.factor, BY_HEAD)
    return [each * lax.broadcast_in_dim(factor, each.shape, [0]) for each in sums]
