"""What a multiplying warpgroup of the index scores kernel does: products, and sums of them."""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.index_scores.mosaic_types import (
    COLUMNS,
    DEPTH,
    ROWS,
    UNIT,
    Operands,
    Segment,
    Shared,
    Spec,
    consumer_of,
)


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


def score_segment(
    operands: Operands, shared: Shared, spec: Spec, consumer: Int[Array, ""], segment: Segment
) -> None:
    """Score the tiles of a segment that are this consumer's: those of every n-th step."""
    tuning = spec.tuning
    consumers = jnp.int32(tuning.consumers)
    buffer = lax.rem(segment.number, jnp.int32(tuning.buffers))
    seen = [operands.visible[segment.row, query] for query in range(spec.count)]
    skipped = consumer_of(consumer + consumers - consumer_of(segment.step, spec), spec)
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


def _left_operand(shared: Shared, spec: Spec, place: Place, first: int) -> Any:
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
    keys: Any,
    prepare: Callable[[], Any],
) -> Any:
    """Products of keys with all columns of a buffer; and what `prepare` made in the meantime."""
    tuning = spec.tuning

    def multiply(products: Any) -> Any:
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
            plgpu.barrier_arrive(shared.turn.at[consumer_of(place.consumer + 1, spec)])
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
        terms = (
            jnp.maximum(products[:, at : at + UNIT], 0.0)
            * lax.broadcast_in_dim(weights[at // UNIT], (len(products), UNIT), (1,))
            for at in range(first, first + heads, UNIT)
        )
        yield functools.reduce(operator.add, terms).sum(axis=1)
