"""What a multiplying warpgroup of the index scores kernel does: products, and sums of them."""

import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.index_scores.mosaic_types import (
    COLUMNS,
    CONSUMERS,
    ROWS,
    UNIT,
    Operands,
    Segment,
    Shared,
    Spec,
    consumer_of,
    lay_out,
    start_of,
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
    consumers = jnp.int32(CONSUMERS)
    buffer = lax.rem(segment.number, jnp.int32(tuning.buffers))
    seen = [operands.visible[segment.row, query] for query in range(spec.count)]
    skipped = consumer_of(consumer + consumers - consumer_of(segment.step))
    tiles = lax.div(segment.end - segment.first - skipped + consumers - 1, consumers)
    plgpu.barrier_wait(shared.queries_full.at[buffer])
    held = _weights(shared, spec, buffer) if tuning.turns and not spec.scaled else None

    def score(number: Int[Array, ""], _: None) -> None:
        tile = skipped + number * consumers
        step, at = segment.step + tile, start_of(segment.first + tile, spec)
        place = Place(consumer, buffer, lax.rem(step, jnp.int32(tuning.stages)))
        out = shared.scores.at[consumer, lax.rem(lax.div(step, consumers), jnp.int32(2))]
        plgpu.barrier_wait(shared.full.at[place.slot])
        sums = _sums(shared, spec, place, held)
        position = at + lay_out(lax.iota(jnp.int32, tuning.rows), ROWS, spec)
        for query, visible in enumerate(seen):
            out[query] = jnp.where(position < visible, sums[query], -jnp.inf)
        # The copy engine may read the scores now, and overwrite the keys and scales.
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.free.at[place.slot])
        plgpu.copy_smem_to_gmem(out, operands.scores.at[segment.row, :, pl.ds(at, tuning.rows)])

    lax.fori_loop(0, tiles, score, None)
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.queries_free.at[buffer])


def _weights(shared: Shared, spec: Spec, buffer: Int[Array, ""]) -> list[Float[Array, "unit"]]:
    """Weights of a buffer, by units of columns."""
    units = range(0, spec.columns, UNIT)
    return [lay_out(shared.weights[buffer, at : at + UNIT], COLUMNS, spec) for at in units]


def _sums(
    shared: Shared, spec: Spec, place: Place, held: list[Float[Array, "unit"]] | None
) -> list[Float[Array, " rows"]]:
    """`sum_h weights_h * relu(query_h . key)` of every query with the keys of a slot."""
    products = _products(shared, spec, place)
    scales = None
    if spec.scaled:
        scales = lay_out(shared.scales[place.slot], ROWS, spec)
    weights = _weights(shared, spec, place.buffer) if held is None else held
    sums = _weighted(products, weights, spec.heads)
    return [total if scales is None else total * scales for total in sums]


def _products(shared: Shared, spec: Spec, place: Place) -> Float[Array, "rows columns"]:
    """Products of the keys of a slot with all columns of a buffer."""
    turns = spec.tuning.turns
    keys, queries = shared.keys.at[place.slot], shared.queries.at[place.buffer]
    if spec.scaled:
        keys = lay_out(keys[...], plgpu.Layout.WGMMA_UPCAST_2X, spec)
        keys = lay_out(keys, plgpu.Layout.WGMMA, spec).astype(jnp.float16)

    def multiply(products: Any) -> Float[Array, "rows columns"]:
        if not spec.interpreted:
            plgpu.wgmma(products, keys, queries.transpose((1, 0)))
        # Meanwhile: the scores before the last ones have left, and their room is free.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        if spec.interpreted:
            # The interpreter multiplies no registers, and that of jax 0.10 transposes nothing.
            return jnp.dot(keys[...], queries[...].T, preferred_element_type=jnp.float32)
        return products[...]

    if turns:
        plgpu.barrier_wait(shared.turn.at[place.consumer])
    made = pl.run_scoped(multiply, plgpu.ACC((spec.tuning.rows, spec.columns), jnp.float32))
    if turns:
        plgpu.barrier_arrive(shared.turn.at[consumer_of(place.consumer + 1)])
    return made


def _weighted(
    products: Float[Array, "rows columns"], weights: list[Float[Array, "unit"]], heads: int
) -> Iterator[Float[Array, " rows"]]:
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
