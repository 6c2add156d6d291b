"""Index scores on a GPU: the queries stay, the keys stream past them once.

One program scores up to 8 queries of a request, all heads, against a run of positions. Queries and
weights are read once; then, block by block, the keys are multiplied with the queries in groups that
fill a matrix unit, `[block, width] x [width, queries * heads]`, and weighted and summed over the
heads in registers. Blocks that no query sees are not read: they only get their -inf.

Traffic: visible keys once for every 8 queries, and the scores in float32. One query per request is
bound by memory. With 8 queries of 32 heads the products are: 2 * 256 * 128 operations per key of
256 bytes are 256 operations per byte, above the 184 that an H200 does in the time of a byte. So
two programs share a multiprocessor there: one multiplies while the other one sums.

float32 operands give float32 results, not tf32: the selection that follows is exact.

What would have to change when Pallas-Triton goes: the same loop as a Mosaic GPU pipeline.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
MOST_QUERIES = 8
"""Queries of a program."""
MOST_WIDTH = {2: 256, 4: 128}
"""Numbers of a key by bytes of a number: float32 operands have to fit in registers."""
MOST_HEADS = 64
LEAST_SIDE = 16
"""Least rows and columns of a matrix operand."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
        block: positions per step of a program.
        steps: steps of a program.
        queries: queries of a program, a power of two; a request with more has several programs.
        product: queries that are multiplied at once, a divisor of `queries`.
        warps: warps of a program.
        stages: depth of the software pipeline: blocks of keys in flight, and one.
    """

    block: int = 128
    steps: int = 24
    queries: int = 1
    product: int = 1
    warps: int = 4
    stages: int = 3


def default_tuning(queries: int, itemsize: int) -> Tuning:
    """The tuning for T queries per request and keys of `itemsize` bytes per number."""
    if itemsize == 4:
        return Tuning(block=32, stages=1)
    together = min(MOST_QUERIES, pl.next_power_of_2(queries))
    if together == 1:
        return Tuning()
    return Tuning(block=64, steps=48, queries=together, product=2)


def supports(
    queries: Float[Array, "R T heads width"], keys: Float[Array, "R C width"]
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, _, heads, width = queries.shape
    if queries.dtype != keys.dtype:
        return f"queries of {queries.dtype} with keys of {keys.dtype}"
    if keys.dtype not in DTYPES:
        return f"keys of {keys.dtype} (only float32 and bfloat16)"
    if width > MOST_WIDTH[keys.dtype.itemsize]:
        return f"{keys.dtype} keys of {width} numbers (at most {MOST_WIDTH[keys.dtype.itemsize]})"
    if heads > MOST_HEADS:
        return f"{heads} heads (at most {MOST_HEADS})"
    return None


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Float[Array, "R C width"],
    visible: Int[Array, "R T"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "R T C"]:
    """See `api.index_scores`. `interpret` runs the kernel as plain XLA operations."""
    requests, count, _, _ = queries.shape
    positions = keys.shape[1]
    tuning = tuning or default_tuning(count, keys.dtype.itemsize)
    grouped = _grouped(queries, weights, visible, tuning.queries)
    groups = grouped.visible.shape[1]
    spec = Spec(heads=_side(queries.shape[2]), count=count, positions=positions, tuning=tuning)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_scores_kernel, spec=spec),
        grid=(groups, pl.cdiv(positions, tuning.block * tuning.steps), requests),
        in_specs=[whole] * 4,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((requests, count, positions), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="index_scores",
    )
    return call(*grouped, keys)


class Grouped(NamedTuple):
    """Queries in the groups of a program, padded to matrix sides with zeros that nobody sees.

    Attributes:
        queries: columns of a product, query by query: all heads of one before the next.
        weights: of the same columns.
        visible: of each query of a group.
    """

    queries: Float[Array, "R groups columns numbers"]
    weights: Float[Array, "R groups columns"]
    visible: Int[Array, "R groups queries"]


class Spec(NamedTuple):
    """What is static in a kernel.

    Attributes:
        heads: heads of a query, padded.
        count: T.
        positions: C.
        tuning: how the work is cut.
    """

    heads: int
    count: int
    positions: int
    tuning: Tuning


def _side(size: int) -> int:
    """The matrix side that holds `size` rows or columns."""
    return max(LEAST_SIDE, pl.next_power_of_2(size))


def _grouped(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    visible: Int[Array, "R T"],
    together: int,
) -> Grouped:
    """Pad and group what is small; with the sizes of GLM there is nothing to pad."""
    requests, count, heads, width = queries.shape
    more = -count % together
    heads_more, width_more = _side(heads) - heads, _side(width) - width
    queries = jnp.pad(queries, ((0, 0), (0, more), (0, heads_more), (0, width_more)))
    weights = jnp.pad(weights, ((0, 0), (0, more), (0, heads_more)))
    visible = jnp.pad(visible, ((0, 0), (0, more)))
    groups = (requests, (count + more) // together)
    columns = together * _side(heads)
    return Grouped(
        queries=queries.reshape(*groups, columns, _side(width)),
        weights=weights.reshape(*groups, columns),
        visible=visible.reshape(*groups, together),
    )


def _scores_kernel(
    queries_ref: jax.Ref,
    weights_ref: jax.Ref,
    visible_ref: jax.Ref,
    keys_ref: jax.Ref,
    scores_ref: jax.Ref,
    *,
    spec: Spec,
) -> None:
    """The scores of one run of positions for one group of queries."""
    tuning = spec.tuning
    group, request = pl.program_id(0), pl.program_id(2)
    start = pl.program_id(1) * tuning.block * tuning.steps
    seen = jnp.minimum(visible_ref[request, group, :].max(), spec.positions)
    columns = tuning.product * spec.heads
    products = [
        (queries_ref[request, group, at, :], weights_ref[request, group, at])
        for at in (pl.ds(first, columns) for first in range(0, queries_ref.shape[2], columns))
    ]
    where = functools.partial(_store, scores_ref, visible_ref, request, group, spec)

    def score(step: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        position = _block_positions(start, step, tuning.block)
        keys = _load_keys(keys_ref, request, position, seen)
        for number, (queries, weights) in enumerate(products):
            where(position, number, _weighted(keys, queries, weights, tuning.product))
        return ()

    def hide(step: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        position = _block_positions(start, step, tuning.block)
        for number in range(len(products)):
            where(position, number, jnp.full((tuning.block, tuning.product), -jnp.inf))
        return ()

    shown = jnp.clip(pl.cdiv(seen - start, tuning.block), 0, tuning.steps)
    lax.fori_loop(0, shown, score, ())
    lax.fori_loop(shown, tuning.steps, hide, ())


def _block_positions(start: Int[Array, ""], step: Int[Array, ""], block: int) -> Int[Array, " b"]:
    """Positions of a step."""
    return start + step * block + jnp.arange(block, dtype=jnp.int32)


def _load_keys(
    ref: jax.Ref, request: Int[Array, ""], position: Int[Array, " b"], seen: Int[Array, ""]
) -> Float[Array, "b numbers"]:
    """Keys of a block; zeros for positions that no query sees, which are not read."""
    width = ref.shape[2]
    column = jnp.arange(_side(width), dtype=jnp.int32)[None]
    live = (position < seen)[:, None]
    if _side(width) != width:
        live = live & (column < width)
    return plgpu.load(ref.at[request, position[:, None], column], mask=live, other=0.0)


def _weighted(
    keys: Float[Array, "b numbers"],
    queries: Float[Array, "columns numbers"],
    weights: Float[Array, " columns"],
    product: int,
) -> Float[Array, "b product"]:
    """`sum_h weights_h * relu(query_h . key)` of `product` queries."""
    exact = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    dots = jnp.dot(keys, queries.T, precision=exact, preferred_element_type=jnp.float32)
    relevance = jnp.maximum(dots, 0.0) * weights[None]
    return relevance.reshape(len(keys), product, -1).sum(axis=2)


def _store(
    scores_ref: jax.Ref,
    visible_ref: jax.Ref,
    request: Int[Array, ""],
    group: Int[Array, ""],
    spec: Spec,
    position: Int[Array, " b"],
    number: int,
    scores: Float[Array, "b product"],
) -> None:
    """Write the scores of product `number`: -inf where a query does not see the position."""
    member = number * spec.tuning.product + jnp.arange(spec.tuning.product, dtype=jnp.int32)
    visible = plgpu.load(visible_ref.at[request, group, member])
    shown = position[:, None] < visible[None]
    query = group * spec.tuning.queries + member
    exists = (position < spec.positions)[:, None] & (query < spec.count)[None]
    plgpu.store(
        scores_ref.at[request, query[None], position[:, None]],
        jnp.where(shown, scores, -jnp.inf),
        mask=exists,
    )
