"""Exact top-K on a TPU: the K-th by bisection, the chosen positions by counting, nothing sorted.

A TPU has no scatter within its vector memory, and XLA's `top_k` there sorts whole rows. So this
kernel only compares, counts and multiplies. A program has eight rows, one per sublane, whose scores
it keeps in VMEM; those of the next program arrive meanwhile.

1. Scores become integers in the same order, `[chunk, row, 128]` (`keys.py`). They are swept once
   per halving of the interval that holds the K-th key, for eight rows at a time, until K keys are
   above its lower end: 32 sweeps at most. If the K-th key has ties that are not all taken, another
   bisection, of positions, finds where they end; it makes no sweep otherwise.
2. What is taken of a row is a matrix of zeros and ones, `[chunk, lane]`. Products with ones and
   with a triangle count them: so many are taken before each chunk. That gives each rank its chunk;
   a product with a one-hot matrix brings the chunk's zeros and ones to the rank, and another
   triangle finds the lane in which the rank's own one is. All of that is exact: the factors are
   integers up to 128, which bfloat16 has, and the sums are float32. Ranks come in tiles of 128, and
   a tile is only multiplied with the blocks of 128 chunks that have ranks of it, so that there are
   at most `K / 128 + C / 16384` products a row, wherever the chosen ones are.

Traffic: scores from HBM once, `4 C` bytes a row, and `4 K` back; a row comes by one DMA from
wherever it is in `[R, T, C]`, which needs no other layout. The rest is arithmetic: a sweep of
100,000 positions of eight rows is 800 registers, each compared and counted.

Tiles: `[8, C]` scores and as many keys in VMEM (6.4 MB for C = 100,000).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.record_layout import LANES
from pallas_kernels.common.triton_select import middle
from pallas_kernels.top_k.keys import LOWEST, keys_of

ROWS = 8
"""Rows of a program: sublanes of a register."""

STEP = 32
"""Chunks of 128 positions that a turn of a sweep compares; each is a register."""

SWEEPS = 32
"""Of all keys, at most, unless there are ties: each halves the range of 32-bit integers."""

HIGHEST = 0x7F800001
"""One more than the key of infinity."""

MOST_VMEM = 96 << 20
"""Bytes of VMEM that a program may have; v5e and v6e have 128 MiB."""


def supports(positions: int, k: int) -> str | None:
    """Why the kernel does not select `k` of rows of so many positions; None if it does."""
    needed = _vmem_bytes(positions, k)
    if needed <= MOST_VMEM:
        return None
    return f"{positions} positions take {needed} bytes of VMEM (at most {MOST_VMEM})"


def top_k(scores: Float[Array, "R T C"], k: int) -> Int[Array, "R T K"]:
    """See `api.top_k`.

    Raises:
        NotImplementedError: if the kernel does not support the shape.
    """
    requests, queries, positions = scores.shape
    if reason := supports(positions, k):
        raise NotImplementedError(reason)
    rows, chunks, tiles = requests * queries, _chunks(positions), pl.cdiv(k, LANES)
    programs = pl.cdiv(rows, ROWS)
    call = pl.pallas_call(
        functools.partial(_top_k_kernel, rows=rows, k=k),
        grid=(programs,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((ROWS, tiles, LANES), lambda program: (program, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((programs * ROWS, tiles, LANES), jnp.int32),
        scratch_shapes=[
            pltpu.VMEM((ROWS, positions), jnp.float32),
            pltpu.VMEM((chunks * ROWS, LANES), jnp.int32),
            pltpu.VMEM((2 * ROWS, LANES), jnp.int32),
            pltpu.VMEM((tiles * LANES, LANES), jnp.float32),
            pltpu.VMEM((tiles, 2, LANES), jnp.float32),
            pltpu.SemaphoreType.DMA((ROWS,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_vmem_bytes(positions, k),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * SWEEPS * scores.size,
            bytes_accessed=4 * (scores.size + rows * k),
            transcendentals=0,
        ),
        interpret=tpu_interpret(),
        name="top_k",
    )
    return call(scores)[:rows].reshape(requests, queries, -1)[..., :k]


def _chunks(positions: int) -> int:
    """Chunks of a row, in whole blocks of as many as a chunk has lanes."""
    return pl.cdiv(positions, LANES * LANES) * LANES


def _vmem_bytes(positions: int, k: int) -> int:
    """Scores and keys of eight rows, what ranks find, and 8 MiB for the values in between."""
    return 4 * ROWS * LANES * 2 * _chunks(positions) + 4 * LANES * (k + LANES) + (8 << 20)


def _top_k_kernel(
    scores_ref: jax.Ref,  # [R, T, C], in HBM
    chosen_ref: jax.Ref,  # [8, tiles, 128]
    row_ref: jax.Ref,  # [8, C]: the scores of the program, then of the next one
    keys_ref: jax.Ref,  # [chunks * 8, 128]
    bound_ref: jax.Ref,  # [2 * 8, 128]: least key that is taken, and where the last of its ties is
    found_ref: jax.Ref,  # [ranks, 128]: for each tile of ranks `[lane, rank]`
    place_ref: jax.Ref,  # [tiles, 2, 128]: the chunk of each rank, and the first rank of that chunk
    semaphores: jax.Ref,  # [8]
    *,
    rows: int,
    k: int,
) -> None:
    program = pl.program_id(0)
    fetch = functools.partial(_copies, scores_ref, row_ref, semaphores, rows)

    @pl.when(program == 0)
    def _first() -> None:
        for copy in fetch(program):
            copy.start()

    for copy in fetch(program):
        copy.wait()
    _write_keys(row_ref, keys_ref)

    @pl.when(program + 1 < pl.num_programs(0))
    def _next() -> None:
        for copy in fetch(program + 1):
            copy.start()

    positions = scores_ref.shape[2]
    key, place = _bounds(functools.partial(_count, keys_ref, positions), positions, k)
    bound_ref[:ROWS] = jnp.broadcast_to(key, (ROWS, LANES))
    bound_ref[ROWS:] = jnp.broadcast_to(place, (ROWS, LANES))

    def one(row: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        count = _place_ranks(keys_ref, bound_ref, found_ref, place_ref, row)
        _write_positions(chosen_ref, found_ref, place_ref, row, count)
        return ()

    lax.fori_loop(0, jnp.minimum(rows - program * ROWS, ROWS), one, ())


def _copies(
    scores_ref: jax.Ref,
    row_ref: jax.Ref,
    semaphores: jax.Ref,
    rows: int,
    program: Int[Array, ""],
) -> list[Any]:
    """The copies that bring the rows of a program; beyond the last row they bring that."""
    queries = scores_ref.shape[1]
    copies: list[Any] = []
    for each in range(ROWS):
        row = jnp.minimum(program * ROWS + each, rows - 1)
        source = scores_ref.at[row // queries, pl.ds(row % queries, 1)]
        copies.append(
            pltpu.make_async_copy(source, row_ref.at[pl.ds(each, 1)], semaphores.at[each])
        )
    return copies


def _write_keys(row_ref: jax.Ref, keys_ref: jax.Ref) -> None:
    """Scores become keys, a register each; those beyond the row cannot be selected."""
    positions, chunks = row_ref.shape[1], keys_ref.shape[0] // ROWS
    whole = positions // LANES

    def write(first: Int[Array, ""], count: int) -> None:
        start = pl.multiple_of(first * LANES, LANES)
        keys = keys_of(row_ref[:, pl.ds(start, count * LANES)])
        for each in range(count):
            to = pl.ds(pl.multiple_of((first + each) * ROWS, ROWS), ROWS)
            keys_ref[to] = keys[:, each * LANES : (each + 1) * LANES]

    def turn(number: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        write(number * STEP, STEP)
        return ()

    lax.fori_loop(0, whole // STEP, turn, ())
    if whole % STEP:
        write(jnp.int32(whole // STEP * STEP), whole % STEP)
    keys_ref[whole * ROWS :] = jnp.full(((chunks - whole) * ROWS, LANES), LOWEST - 1, jnp.int32)
    if rest := positions % LANES:
        keys_ref[whole * ROWS : (whole + 1) * ROWS, :rest] = keys_of(row_ref[:, whole * LANES :])


def _count(
    keys_ref: jax.Ref, positions: int, test: Callable[[jax.Array, jax.Array], jax.Array]
) -> Int[Array, "8 1"]:
    """How many of each row pass a test of keys and positions, which are `[chunks, 8, 128]`."""
    shape = (STEP, ROWS, LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES
    lane = lane + lax.broadcasted_iota(jnp.int32, shape, 2)

    def turn(number: Int[Array, ""], counted: Int[Array, "8 128"]) -> Int[Array, "8 128"]:
        size = STEP * ROWS
        keys = keys_ref[pl.ds(pl.multiple_of(number * size, size), size)].reshape(shape)
        passed = test(keys, lane + number * (STEP * LANES))
        return counted + jnp.where(passed, 1, 0).sum(axis=0)

    turns = pl.cdiv(positions, STEP * LANES)
    counted = lax.fori_loop(0, turns, turn, jnp.zeros((ROWS, LANES), jnp.int32))
    return counted.sum(axis=1, keepdims=True)


def _bounds(
    count: Callable[[Callable[[jax.Array, jax.Array], jax.Array]], Int[Array, "8 1"]],
    positions: int,
    k: int,
) -> tuple[Int[Array, "8 1"], Int[Array, "8 1"]]:
    """The least key that is taken of each row, and the last position at which that one is."""
    wide = lambda bound: bound[None]  # [1, 8, 1]
    least = jnp.full((ROWS, 1), LOWEST, jnp.int32)
    above = lambda bound: count(lambda keys, _: keys >= wide(bound))
    selectable = above(least)
    wanted = jnp.minimum(selectable, k)
    key, reached, more = _bisect(above, least, jnp.full_like(least, HIGHEST), selectable, wanted)
    tied = reached != wanted
    # Positions from the end: the fewer of them, the larger the bound, as with keys.
    ties = lambda bound: count(lambda keys, place: (keys == wide(key)) & (-place >= wide(bound)))
    low = jnp.full_like(least, 1 - positions)
    high = jnp.where(tied, 1, low + 1)
    place, _, _ = _bisect(ties, low, high, reached - more, wanted - more)
    return key, -place


def _bisect(
    size: Callable[[Int[Array, "8 1"]], Int[Array, "8 1"]],
    low: Int[Array, "8 1"],
    high: Int[Array, "8 1"],
    reached: Int[Array, "8 1"],
    wanted: Int[Array, "8 1"],
) -> tuple[Int[Array, "8 1"], Int[Array, "8 1"], Int[Array, "8 1"]]:
    """The largest bound that `wanted` or more reach; earlier, one that exactly so many do.

    Args:
        size: how many of each row reach a bound; the larger the bound, the fewer.
        low: a bound that `wanted` reach.
        high: one that they do not.
        reached: how many reach `low`.
        wanted: how many should.

    Returns:
        The bound, how many reach it, and how many reach the next one, if that was counted.
    """
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def open_(low: jax.Array, high: jax.Array, reached: jax.Array) -> jax.Array:
        return (low + 1 < high) & (reached != wanted)

    def unfinished(state: State) -> jax.Array:
        low, high, reached, _ = state
        return jnp.max(jnp.where(open_(low, high, reached), 1, 0)) > 0

    def halve(state: State) -> State:
        low, high, reached, more = state
        half = middle(low, high)
        counted = size(half)
        going = open_(low, high, reached)
        up, down = going & (counted >= wanted), going & (counted < wanted)
        return (
            jnp.where(up, half, low),
            jnp.where(down, half, high),
            jnp.where(up, counted, reached),
            jnp.where(down, counted, more),
        )

    low, _, reached, more = lax.while_loop(
        unfinished, halve, (low, high, reached, jnp.zeros_like(low))
    )
    return low, reached, more


def _triangle() -> Float[Array, "128 128"]:
    """Ones where the column is not beyond the row: a product sums up to each row."""
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    return _ones(column <= row)


def _ones(where: jax.Array) -> Float[Array, "..."]:
    return jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)


def _dot(
    a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int] = (1, 0)
) -> Float[Array, "128 128"]:
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32
    )


def _place_ranks(
    keys_ref: jax.Ref,
    bound_ref: jax.Ref,
    found_ref: jax.Ref,
    place_ref: jax.Ref,
    row: Int[Array, ""],
) -> Int[Array, ""]:
    """For each rank of a row: its chunk, that chunk's first rank, and what it has taken."""
    found_ref[...] = jnp.zeros(found_ref.shape, jnp.float32)
    place_ref[...] = jnp.zeros(place_ref.shape, jnp.float32)
    shape = (LANES, LANES)
    chunk, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    triangle, ones = _triangle(), jnp.ones(shape, jnp.bfloat16)
    least, last = bound_ref[pl.ds(row, 1)], bound_ref[pl.ds(ROWS + row, 1)]

    def block(number: Int[Array, ""], before: Int[Array, ""]) -> Int[Array, ""]:
        keys = keys_ref[pl.ds(number * (LANES * ROWS) + row, LANES, stride=ROWS)]
        chunks = number * LANES + chunk
        take = (keys > least) | ((keys == least) & (chunks * LANES + lane <= last))
        taken = _ones(take)
        counts = _dot(taken, ones)
        ends = before.astype(jnp.float32) + _dot(triangle, counts.astype(jnp.bfloat16))
        starts = ends - counts

        def tile(number: Int[Array, ""], _: tuple[()]) -> tuple[()]:
            rank = (number * LANES + lane).astype(jnp.float32)
            here = (starts <= rank) & (rank < ends)
            at = pl.ds(pl.multiple_of(number * LANES, LANES), LANES)
            found_ref[at] += _dot(taken, _ones(here), (0, 0))
            facts = (chunks.astype(jnp.float32), starts)
            for which, fact in enumerate(facts):
                add = jnp.where(here, fact, 0.0).sum(axis=0, keepdims=True)
                place_ref[number, which : which + 1] += add
            return ()

        after = jnp.max(ends).astype(jnp.int32)
        lax.fori_loop(before // LANES, pl.cdiv(after, LANES), tile, ())
        return after

    return lax.fori_loop(0, keys_ref.shape[0] // (LANES * ROWS), block, jnp.int32(0))


def _write_positions(
    chosen_ref: jax.Ref,
    found_ref: jax.Ref,
    place_ref: jax.Ref,
    row: Int[Array, ""],
    count: Int[Array, ""],
) -> None:
    """The position of each rank of a row: its chunk, and the lane that is the rank's in there."""
    triangle = _triangle()

    def tile(number: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        start = pl.multiple_of(number * LANES, LANES)
        within = _dot(triangle, found_ref[pl.ds(start, LANES)].astype(jnp.bfloat16))
        rank = start + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        chunk, first = place_ref[number, :1], place_ref[number, 1:]
        lane = jnp.where(within <= rank.astype(jnp.float32) - first, 1, 0)
        position = chunk.astype(jnp.int32) * LANES + lane.sum(axis=0, keepdims=True)
        chosen_ref[row, pl.ds(number, 1)] = jnp.where(rank < count, position, NO_SLOT)
        return ()

    lax.fori_loop(0, chosen_ref.shape[1], tile, ())
