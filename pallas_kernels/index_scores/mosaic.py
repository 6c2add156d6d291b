"""Index scores on a Hopper GPU: keys stream through shared memory into the matrix units.

A fixed number of programs, one per multiprocessor, share the visible tiles of all requests evenly.
In a program one warpgroup only copies: tiles of keys into a ring of slots, and the queries of a
request when its first tile comes up. The others multiply, in turn: a tile is the left operand of
`wgmma`, `[keys, width] x [width, queries * heads]`, and its products are rectified, weighted and
summed over the heads in registers, where a thread holds parts of two keys and adds up most of a sum
by itself. Scores leave through shared memory. Tiles that no query sees are not read: the copying
warpgroup writes their -inf when it has nothing left to copy.

fp8 keys go through registers: their 128 numbers become float16, which holds every e4m3 number, and
so do the queries, after a power of two per head brings the largest number of each near the top of
float16. What that rounds is 2^-39 of the largest number; the power is taken back from the head's
weight. So products and sums are those of the exact keys in float32. The matrix units' own fp8
products are no choice: they need fp8 queries, and add up in fewer bits than float32 has.

Traffic: visible keys once, queries a few times from the cache, scores once. Work: one query per
request is bound by memory. Eight queries of 32 heads are 2 * 256 * 128 operations per key, and so
bound by the matrix units (as fp8 keys of half the bytes are all the more); there, one warpgroup
sums while the other one multiplies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common.mosaic import kernel, params
from pallas_kernels.common.scaled_rows import power_of_two
from pallas_kernels.index_scores.mosaic_program import program
from pallas_kernels.index_scores.mosaic_types import (
    CONSUMERS,
    MOST_BOX,
    SWIZZLE,
    UNIT,
    Operands,
    Spec,
    Tuning,
    shared_memory,
)
from pallas_kernels.index_scores.types import Keys, ScaledKeys

MOST_COLUMNS = 256
"""Columns of a `wgmma`: queries times heads."""
MOST_WIDTH = 128
"""Numbers of a key: queries and tiles of longer ones do not fit into shared memory."""
KEYS_UNIT = 8
"""Keys of a request come in multiples of this, or are copied first: the tiling of shared memory."""
LEAST_COPY = 32
"""Words of a copy into shared memory: every thread of a warpgroup accounts for a byte or more."""


def default_tuning(count: int, heads: int, *, scaled: bool) -> Tuning:
    """The tuning for T queries per request of so many heads."""
    columns = min(count * heads, MOST_COLUMNS)
    if columns <= MOST_COLUMNS // 2:
        # fp8 keys have half the bytes, so a tile has twice the keys: measured, 71 us instead of 83.
        return Tuning(rows=128) if scaled and columns <= 64 else Tuning()
    return Tuning(stages=12 if scaled else 6, buffers=1, turns=True)


def supports(queries: Float[Array, "R T heads width"], keys: Keys) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, count, heads, width = queries.shape
    requests, positions, _ = keys.shape
    scaled = isinstance(keys, ScaledKeys)
    numbers = SWIZZLE // keys.dtype.itemsize
    if queries.dtype != jnp.bfloat16:
        return f"queries of {queries.dtype} (only bfloat16)"
    if keys.dtype != (jnp.float8_e4m3fn if scaled else jnp.bfloat16):
        return f"keys of {keys.dtype} (only bfloat16, and float8_e4m3fn with scales)"
    if width % numbers or width > MOST_WIDTH:
        return f"keys of {width} numbers (only multiples of {numbers} up to {MOST_WIDTH})"
    if heads > MOST_COLUMNS:
        return f"{heads} heads (at most {MOST_COLUMNS})"
    if requests * _groups(count, heads) > LEAST_COPY * MOST_BOX:
        return f"{requests} x {count} queries (at most {LEAST_COPY * MOST_BOX} products)"
    if scaled and requests * positions >= 2**31:
        return f"{requests} x {positions} scales (fewer than 2^31)"
    return None


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "R T C"]:
    """See `api.index_scores`. `interpret` are parameters of the GPU interpreter."""
    requests, count, heads, _ = queries.shape
    positions = keys.shape[1]
    scaled = isinstance(keys, ScaledKeys)
    tuning = tuning or default_tuning(count, heads, scaled=scaled)
    interpreted = interpret is not None
    operands, spec = _operands(queries, weights, keys, visible, tuning, interpreted=interpreted)
    run = kernel(
        functools.partial(program, spec=spec),
        out=[jax.ShapeDtypeStruct((spec.rows, spec.count, spec.positions), jnp.float32)],
        scratch=shared_memory(spec, operands)._asdict(),
        mesh=plgpu.Mesh(
            grid=(tuning.programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=params(),
        name="index_scores",
        interpret=interpret or False,
    )
    (scores,) = run(*(operand for operand in operands if operand is not None))
    scores = scores.reshape(requests, spec.groups * spec.count, spec.positions)
    return scores[:, :count, :positions]


def _round_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return pl.cdiv(size, unit) * unit


def visible_tiles(visible: Int[Array, " n"], positions: int, rows: int) -> Int[Array, " n"]:
    """How many tiles are scored for so many visible keys.

    The last tile, moved back to end with the keys, has keys of the one before. So it is scored too
    if that one is, even if nothing else of it is visible: else it would be hidden with them.
    """
    tiles = pl.cdiv(jnp.clip(visible, 0, positions), rows)
    last = pl.cdiv(positions, rows) - 1
    return jnp.where(tiles == last, last + 1, tiles) if positions % rows else tiles


def _groups(count: int, heads: int) -> int:
    """Products that the columns of T queries take."""
    return pl.cdiv(count, MOST_COLUMNS // _round_up(heads, UNIT))


def _filled(words: Shaped[Array, "*n words"]) -> Shaped[Array, "*n more"]:
    """Zeros at the end, so that a copy moves enough."""
    last = words.shape[-1]
    more = _round_up(last, LEAST_COPY) - last
    return jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, more)])


def _operands(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    tuning: Tuning,
    *,
    interpreted: bool,
) -> tuple[Operands, Spec]:
    """Group and pad what is small; with the sizes of GLM there is nothing to pad but `tiles`."""
    requests, count, heads, width = queries.shape
    heads_more = _round_up(heads, UNIT) - heads
    groups = _groups(count, heads)
    together = pl.cdiv(count, groups)
    count_more = groups * together - count
    rows, columns = requests * groups, together * (heads + heads_more)
    numbers, scales = keys if isinstance(keys, ScaledKeys) else (keys, None)
    if scales is not None:
        queries, weights = _float16_queries(queries, weights)
    positions = keys.shape[1]
    if positions < tuning.rows or positions % KEYS_UNIT:
        short = _round_up(positions, tuning.rows) - positions
        numbers = jnp.pad(numbers, ((0, 0), (0, short), (0, 0)))
        scales = None if scales is None else jnp.pad(scales, ((0, 0), (0, short)))
    queries = jnp.pad(queries, ((0, 0), (0, count_more), (0, heads_more), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, count_more), (0, heads_more)))
    visible = jnp.pad(visible, ((0, 0), (0, count_more))).reshape(rows, together)
    # A maximum of columns and not over an axis: one small kernel, or part of the one before.
    most = functools.reduce(jnp.maximum, [visible[:, query] for query in range(together)])
    operands = Operands(
        tiles=_filled(visible_tiles(most, numbers.shape[1], tuning.rows)).reshape(-1, LEAST_COPY),
        visible=visible,
        queries=queries.reshape(rows, columns, width),
        weights=_filled(weights.reshape(rows, columns)),
        keys=numbers,
        scales=None if scales is None else scales.reshape(-1),
    )
    return operands, Spec(
        rows=rows,
        groups=groups,
        count=together,
        heads=heads + heads_more,
        positions=numbers.shape[1],
        width=width,
        scaled=scales is not None,
        interpreted=interpreted,
        tuning=tuning,
    )


def _float16_queries(
    queries: Float[Array, "R T heads width"], weights: Float[Array, "R T heads"]
) -> tuple[Float[Array, "R T heads width"], Float[Array, "R T heads"]]:
    """bfloat16 queries as float16, and weights that undo the power of two that this takes."""
    exact = queries.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(exact), axis=-1))
    # In two steps: the power of each is a normal number, whatever the exponent.
    powers = [power_of_two(127 + part) for part in ((15 - exponent) // 2, (16 - exponent) // 2)]
    scaled = exact * powers[0][..., None] * powers[1][..., None]
    return scaled.astype(jnp.float16), weights / powers[0] / powers[1]
