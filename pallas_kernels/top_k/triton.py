"""Exact top-K on a GPU: a bound from group maxima, one filtering pass, and a choice in registers.

A row is one program in each of two kernels, and no kernel sorts.

1. `_narrow_kernel` reads the row once and keeps the maximum of every group of positions that are
   `block` apart: K groups with a maximum of at least `low` mean K positions with at least `low`. So
   the K-th largest maximum bounds the K-th largest score from below, whatever the scores are, and
   it is close: 8,192 groups of 100,000 random scores leave 2,330 candidates for K = 2048. A second
   pass writes the candidates' positions, in order. If they do not fit (scores that tie or cluster),
   further passes halve the interval that holds the K-th score until they do, or until it is one
   value, of whose ties the first ones are taken.
2. `_choose_kernel` holds the candidates in registers, finds the exact K-th by bisection, and writes
   the chosen positions in order. Short rows come here at once.

Traffic: the scores from device memory once, and again from L2 (a row is 400 KB, all rows of a step
are about its size); candidates and result are small. Each further pass adds a read.
What would have to change when Pallas-Triton goes: the same loops as a Mosaic GPU kernel, with the
row's chunks brought by TMA.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.triton_select import middle, ranks, taken
from pallas_kernels.top_k.keys import LOWEST, keys_of

LARGEST_K = 4096
"""Beyond, the candidates of a row would not fit into the registers of one program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes of the programs.

    Attributes:
        block: positions that are compared at a time, and the number of groups; at least 2 K serves.
        candidates: how many survive the first kernel at most; at least K.
        unroll: blocks whose loads are in flight together.
        warps: warps of a program of the first kernel.
        choose_warps: warps of a program of the second.
    """

    block: int
    candidates: int
    unroll: int = 4
    warps: int = 16
    choose_warps: int = 8


def tuning(k: int) -> Tuning:
    """Sizes for a given K: room for four times as many candidates as are wanted."""
    room = max(2048, pl.next_power_of_2(4 * k))
    return Tuning(block=min(room, 8192), candidates=room)


def supports(positions: int, k: int) -> str | None:
    """Why the kernels do not select `k` of rows of so many positions; None if they do."""
    if k > LARGEST_K:
        return f"K = {k} is more than {LARGEST_K}"
    if positions * 4 >= 2**31:
        return f"a row of {positions} scores has 2 GiB or more"
    return None


def top_k(
    scores: Float[Array, "R T C"], k: int, *, sizes: Tuning | None = None, interpret: bool = False
) -> Int[Array, "R T K"]:
    """See `api.top_k`.

    Raises:
        NotImplementedError: if the kernels do not support the shape.
    """
    requests, queries, positions = scores.shape
    if reason := supports(positions, k):
        raise NotImplementedError(reason)
    sizes = sizes or tuning(k)
    rows = scores.reshape(requests * queries, positions)
    if positions <= sizes.candidates:
        candidates, count = None, None
    else:
        candidates, count = _narrow(rows, k, sizes, interpret)
    chosen = _choose(rows, candidates, count, k, sizes, interpret)
    return chosen.reshape(requests, queries, k)


def _narrow(
    rows: Float[Array, "N C"], k: int, sizes: Tuning, interpret: bool
) -> tuple[Int[Array, "N room"], Int[Array, " N"]]:
    """Candidates of each row by ascending position, and how many there are."""
    count = rows.shape[0]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_narrow_kernel, k=k, positions=rows.shape[1], sizes=sizes),
        grid=(count,),
        in_specs=[whole],
        out_specs=(whole, whole),
        out_shape=(
            jax.ShapeDtypeStruct((count, sizes.candidates), jnp.int32),
            jax.ShapeDtypeStruct((count,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=1),
        interpret=interpret,
        name="top_k_narrow",
    )
    return call(rows)


def _choose(
    rows: Float[Array, "N C"],
    candidates: Int[Array, "N room"] | None,
    count: Int[Array, " N"] | None,
    k: int,
    sizes: Tuning,
    interpret: bool,
) -> Int[Array, "N K"]:
    """The K best candidates of each row; without candidates, of all its positions."""
    operands = [rows] if candidates is None else [rows, candidates, count]
    width = rows.shape[1] if candidates is None else candidates.shape[1]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_choose_kernel, k=k, width=width),
        grid=(rows.shape[0],),
        in_specs=[whole] * len(operands),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], k), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.choose_warps, num_stages=1),
        interpret=interpret,
        name="top_k_choose",
    )
    return call(*operands)


def _narrow_kernel(
    scores_ref: jax.Ref,  # [N, C]
    candidates_ref: jax.Ref,  # [N, room]
    count_ref: jax.Ref,  # [N]
    *,
    k: int,
    positions: int,
    sizes: Tuning,
) -> None:
    row = pl.program_id(0)
    load = functools.partial(_load_keys, scores_ref, row, positions, sizes.block)
    low, end = _bound(load, positions, k, sizes)

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        return state[-1] == 0

    def filter_row(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above, probe, passes, _, _ = state
        exact = low + 1 >= high  # then probe is low: all above it, and as many ties as are missing
        sure = jnp.where(exact, high, probe)
        count = _compact(
            load, candidates_ref, row, (probe, sure, k - above), positions=positions, sizes=sizes
        )
        enough = (count >= k) | (probe == LOWEST)
        low, high = jnp.where(enough, probe, low), jnp.where(enough, high, probe)
        above = jnp.where(enough, above, count)
        done = (enough & (count <= sizes.candidates)).astype(jnp.int32)
        # Ties (many scores of 0.0, say) are the likely reason for too many: look just above first.
        halfway = jnp.where(passes == 0, low + 1, middle(low, high))
        probe = jnp.where(low + 1 >= high, low, halfway)
        return low, high, above, probe, passes + 1, count, done

    zero = jnp.int32(0)
    state = lax.while_loop(unfinished, filter_row, (low, end, zero, low, zero, zero, zero))
    plgpu.store(count_ref.at[row], state[-2])


def _choose_kernel(*refs: jax.Ref, k: int, width: int) -> None:
    scores_ref, *candidates, chosen_ref = refs
    row = pl.program_id(0)
    place = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    position, live = place, place < width
    if candidates:
        candidates_ref, count_ref = candidates
        live = place < plgpu.load(count_ref.at[row])
        position = plgpu.load(candidates_ref.at[row, place], mask=live, other=0)
    keys = keys_of(plgpu.load(scores_ref.at[row, position], mask=live, other=-jnp.inf))
    low, high, above = _kth(keys, jnp.minimum(k, jnp.sum((keys >= LOWEST).astype(jnp.int32))))
    take, rank, count = ranks(keys >= high, keys >= low, k - above, (0, 0))
    # What is not taken goes past the end: a mask on the GPU, a dropped index in interpret mode.
    plgpu.store(chosen_ref.at[row, jnp.where(take, rank, k)], position, mask=take)
    rest = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)
    empty = (rest >= taken(count, k - above)) & (rest < k)
    plgpu.store(chosen_ref.at[row, rest], jnp.full_like(rest, NO_SLOT), mask=empty)


def _load_keys(
    scores_ref: jax.Ref, row: jax.Array, positions: int, block: int, number: jax.Array | int
) -> Int[Array, " block"]:
    """Keys of block `number` of a row; those beyond its end cannot be selected."""
    place = number * block + jnp.arange(block, dtype=jnp.int32)
    inside = place < positions
    return keys_of(plgpu.load(scores_ref.at[row, place], mask=inside, other=-jnp.inf))


def _turns(positions: int, sizes: Tuning) -> int:
    return pl.cdiv(positions, sizes.block * sizes.unroll)


def _bound(
    load: functools.partial[jax.Array], positions: int, k: int, sizes: Tuning
) -> tuple[jax.Array, jax.Array]:
    """A key that at least K positions reach (if so many are selectable), and one that none does."""

    def turn(number: jax.Array, best: jax.Array) -> jax.Array:
        loaded = [load(number * sizes.unroll + each) for each in range(sizes.unroll)]
        return functools.reduce(jnp.maximum, loaded, best)

    start = jnp.full((sizes.block,), LOWEST - 1, jnp.int32)
    best = lax.fori_loop(0, _turns(positions, sizes), turn, start)
    groups = jnp.sum((best >= LOWEST).astype(jnp.int32))
    low, _, _ = _kth(best, jnp.int32(k))
    return jnp.where(groups < k, LOWEST, low), jnp.maximum(jnp.max(best) + 1, LOWEST + 1)


def _kth(
    keys: Int[Array, " n"], k: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Bisect for the K-th largest key, of those from LOWEST on.

    Returns:
        (low, high, above): `above` < K keys are >= high, and at least K are >= low. Either high is
        low + 1, so that low is the K-th key, or exactly K keys are >= low.
    """
    size = lambda key: jnp.sum((keys >= key).astype(jnp.int32))

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, _, reached = state
        return (low + 1 < high) & (reached != k)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above, reached = state
        half = middle(low, high)
        count = size(half)
        enough = count >= k
        return (
            jnp.where(enough, half, low),
            jnp.where(enough, high, half),
            jnp.where(enough, above, count),
            jnp.where(enough, count, reached),
        )

    low = jnp.maximum(jnp.min(keys), LOWEST)
    high = jnp.maximum(jnp.max(keys), LOWEST) + 1
    low, high, above, _ = lax.while_loop(unfinished, halve, (low, high, jnp.int32(0), size(low)))
    return low, high, above


def _compact(
    load: functools.partial[jax.Array],
    candidates_ref: jax.Ref,
    row: jax.Array,
    limits: tuple[jax.Array, jax.Array, jax.Array],
    *,
    positions: int,
    sizes: Tuning,
) -> Int[Array, ""]:
    """Write the positions whose key is within the limits, in order, while there is room.

    Args:
        load: the keys of a block.
        candidates_ref: where to write.
        row: which row.
        limits: the least key, the key from which all are taken, how many below that are taken.
        positions: length of the row.
        sizes: sizes of the programs.

    Returns:
        How many there are, room or not.
    """
    probe, sure, ties = limits

    def write(
        keys: jax.Array, number: jax.Array, before: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        take, rank, after = ranks(keys >= sure, keys >= probe, ties, before)
        take = take & (rank < sizes.candidates)
        place = number * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)
        target = jnp.where(take, rank, sizes.candidates)  # past the end, see _choose_kernel
        plgpu.store(candidates_ref.at[row, target], place, mask=take)
        return after

    def turn(number: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first = number * sizes.unroll
        loaded = [load(first + each) for each in range(sizes.unroll)]
        for each, keys in enumerate(loaded):
            before = write(keys, first + each, before)
        return before

    zero = jnp.int32(0)
    return taken(lax.fori_loop(0, _turns(positions, sizes), turn, (zero, zero)), ties)
