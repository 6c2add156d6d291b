"""Pallas-Triton kernel: keys and values of a ring are read once, as they lie.

XLA transposes the keys and values of a layer for its products, and writes and reads the logits
several times. Here a program has one key head of a request, and all rows of the block with all
query heads that share it: 32 rows of GLM's drafts, two tiles of the matrix units. It goes through
the positions from the newest to the oldest that any row sees, a block of them at a time, with a
running softmax (Milakov and Gimelshein, 2018; Dao, 2023), while the next blocks are under way. So
no block but the last is in part beyond what is seen, and a short context takes little time.

A warp does one thing after the other, so a processor needs several of them to keep memory busy:
programs are small, positions are split until there are `programs` of them, and XLA merges what the
splits have. All splits start from the block's own rows, whose weights only the first one keeps: a
row sees itself, so every running maximum is a number.

Float32 is what results are compared in: its products are taken outside of the matrix units, and
nothing of it is tuned.

What would have to change when Pallas-Triton goes: nothing here is more than loads, products, and
arithmetic on rows; Mosaic's matrix units take 64 rows, so two key heads would have to share a
program.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.draft_attention.types import KeysValues, RingSeen

LEAST_SIDE = 16
"""Rows and columns of a product at least."""
MOST_ROWS = 128
"""Query rows of a key head at most, and numbers of a head: they are in registers."""
MOST_SPLITS = 16
"""Parts of a context at most: all are merged at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut.

    Attributes:
        block: positions of a step of a program; a power of two.
        programs: how many there should be at least, if contexts can be split so often.
        stages: blocks under way.
        rows: query rows of a program for each of its warps; a power of two.
    """

    block: int = 64
    programs: int = 512
    stages: int = 3
    rows: int = 16


FLOAT32 = Tuning(block=16, stages=1, rows=4)
"""Of float32 numbers."""
MOST_FLOAT32 = 4096
"""Numbers of a program's queries at most, if they are float32: more do not fit into registers."""


def supports(queries: Float[Array, "R T H dim"], ring: KeysValues, own: KeysValues) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, count, heads, dim = queries.shape
    dtypes = {queries.dtype, *(part.dtype for part in (*ring, *own))}
    if len(dtypes) > 1 or queries.dtype not in (jnp.bfloat16, jnp.float32):
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return f"numbers of {names} (only of bfloat16 or of float32)"
    if dim not in (16, 32, 64, 128):
        return f"heads of {dim} numbers (only 16, 32, 64 and 128)"
    rows = count * heads // own.keys.shape[2]
    wide = queries.dtype == jnp.float32
    most = min(MOST_ROWS, MOST_FLOAT32 // dim) if wide else MOST_ROWS
    if rows > most:
        return f"{rows} query rows of a key head (at most {most})"
    return None


def draft_attention(
    queries: Float[Array, "R T H dim"],
    ring: KeysValues,
    own: KeysValues,
    seen: RingSeen,
    layer: Int[Array, ""],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "R T H dim"]:
    """See `api.draft_attention`.

    Raises:
        NotImplementedError: if the kernel does not support the operands.
    """
    if reason := supports(queries, ring, own):
        raise NotImplementedError(reason)
    sizes = tuning or (FLOAT32 if queries.dtype == jnp.float32 else Tuning())
    requests, count, heads, _ = queries.shape
    _, _, capacity, kv, _ = ring.keys.shape
    rows = max(LEAST_SIDE, pl.next_power_of_2(count * heads // kv))
    splits = _splits(requests * kv, pl.cdiv(capacity, sizes.block), sizes)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    per_row = jax.ShapeDtypeStruct((splits, requests, count, heads), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_kernel, rows=rows, block=sizes.block),
        grid=(kv, splits, requests),
        in_specs=[whole] * 9,
        out_specs=[whole] * 3,
        out_shape=[jax.ShapeDtypeStruct((splits, *queries.shape), jnp.float32), per_row, per_row],
        compiler_params=plgpu.CompilerParams(
            num_warps=min(8, rows // sizes.rows), num_stages=sizes.stages
        ),
        interpret=interpret,
        name="draft_attention",
    )
    block = seen.block.astype(jnp.int32)
    at = jnp.asarray(layer, jnp.int32).reshape(1)
    sums, peaks, totals = call(queries, *ring, *own, seen.next, seen.counts, block, at)
    return _merged(sums, peaks, totals, queries.dtype)


def _splits(programs: int, blocks: int, sizes: Tuning) -> int:
    """Into how many parts a context of so many blocks is split."""
    return max(1, min(pl.cdiv(sizes.programs, programs), blocks, MOST_SPLITS))


def _merged(
    sums: Float[Array, "splits R T H dim"],
    peaks: Float[Array, "splits R T H"],
    totals: Float[Array, "splits R T H"],
    dtype: jnp.dtype,
) -> Float[Array, "R T H dim"]:
    """Attention over all splits; taken one by one, they are two small kernels of XLA's."""
    peak = functools.reduce(jnp.maximum, peaks)
    factors = [jnp.exp2(each - peak) for each in peaks]
    total = functools.reduce(jnp.add, map(jnp.multiply, factors, totals))
    weighted = [factor[..., None] * each for factor, each in zip(factors, sums, strict=True)]
    return (functools.reduce(jnp.add, weighted) / total[..., None]).astype(dtype)


def _kernel(
    queries_ref: jax.Ref,  # [R, T, H, dim]
    keys_ref: jax.Ref,  # [R, layers, C, kv, dim]
    values_ref: jax.Ref,  # [R, layers, C, kv, dim]
    own_keys_ref: jax.Ref,  # [R, T, kv, dim]
    own_values_ref: jax.Ref,  # [R, T, kv, dim]
    next_ref: jax.Ref,  # [R]
    counts_ref: jax.Ref,  # [R, T]
    block_ref: jax.Ref,  # [T, T]
    layer_ref: jax.Ref,  # [1]
    sums_ref: jax.Ref,  # [splits, R, T, H, dim]
    peaks_ref: jax.Ref,  # [splits, R, T, H]
    totals_ref: jax.Ref,  # [splits, R, T, H]
    *,
    rows: int,
    block: int,
) -> None:
    key_head, split, request = (pl.program_id(axis) for axis in range(3))
    _, count, heads, dim = queries_ref.shape
    _, _, capacity, kv, _ = keys_ref.shape
    group, column = heads // kv, _iota(dim)[None]
    # Rows that there are not are the last token's again, and are not stored: a mask on the GPU, an
    # index that is dropped in interpret mode.
    place = _iota(rows) // group
    token = jnp.minimum(place, count - 1)
    head = key_head * group + _iota(rows) % group
    queries = plgpu.load(queries_ref.at[request, token[:, None], head[:, None], column])
    counts = plgpu.load(counts_ref.at[request, token])
    most, layer = counts.max(), layer_ref[0]
    own = _attended_own(queries, token, request, key_head, own_keys_ref, own_values_ref, block_ref)
    mine = (split == 0).astype(jnp.float32)
    carry = own[0] * mine, own[1], own[2] * mine
    newest = lax.rem(next_ref[request] - 1, capacity)

    def attend(step: Array, carry: Carry) -> Carry:
        age = step * block + _iota(block)
        slot = jnp.where(age <= newest, newest - age, newest - age + capacity)[:, None]
        live = (age < most)[:, None]
        load = lambda ref: plgpu.load(
            ref.at[request, layer, slot, key_head, column], mask=live, other=0.0
        )
        shown = age[None] < counts[:, None]
        return _attended(carry, queries, load(keys_ref), load(values_ref), shown)

    blocks = pl.cdiv(most, block)
    each = pl.cdiv(blocks, sums_ref.shape[0])
    end = jnp.minimum((split + 1) * each, blocks)
    sums, peak, total = lax.fori_loop(split * each, end, attend, carry)
    kept = place < count
    at = sums_ref.at[split, request, place[:, None], head[:, None], column]
    plgpu.store(at, sums, mask=kept[:, None])
    plgpu.store(peaks_ref.at[split, request, place, head], peak * _factor(dim), mask=kept)
    plgpu.store(totals_ref.at[split, request, place, head], total, mask=kept)


Carry = tuple[Float[Array, "rows dim"], Float[Array, " rows"], Float[Array, " rows"]]
"""Of each row: weighted values, the largest product, the sum of weights, relative to that."""


def _attended_own(
    queries: Float[Array, "rows dim"],
    token: Int[Array, " rows"],
    request: Int[Array, ""],
    key_head: Int[Array, ""],
    keys_ref: jax.Ref,
    values_ref: jax.Ref,
    block_ref: jax.Ref,
) -> Carry:
    """Over the rows of the block itself."""
    (rows, dim), count = queries.shape, keys_ref.shape[1]
    other = _iota(max(LEAST_SIDE, pl.next_power_of_2(count)))
    at, column = jnp.minimum(other, count - 1), _iota(dim)[None]
    load = lambda ref: plgpu.load(ref.at[request, at[:, None], key_head, column])
    shown = plgpu.load(block_ref.at[token[:, None], at[None]]) != 0
    nothing = jnp.zeros((rows, dim), jnp.float32), jnp.full(rows, -jnp.inf), jnp.zeros(rows)
    shown &= (other < count)[None]
    return _attended(nothing, queries, load(keys_ref), load(values_ref), shown)


def _attended(
    carry: Carry,
    queries: Float[Array, "rows dim"],
    keys: Float[Array, "b dim"],
    values: Float[Array, "b dim"],
    shown: Bool[Array, "rows b"],
) -> Carry:
    """After some more positions; the same softmax in powers of two."""
    sums, peak, total = carry
    product = functools.partial(
        jnp.dot, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    products = jnp.where(shown, product(queries, keys.T), -jnp.inf)
    factor, before = _factor(queries.shape[1]), peak
    peak = jnp.maximum(peak, products.max(axis=1))
    weights = jnp.exp2(products * factor - (peak * factor)[:, None])
    kept = jnp.exp2((before - peak) * factor)
    sums = sums * kept[:, None] + product(weights.astype(values.dtype), values)
    return sums, peak, total * kept + weights.sum(axis=1)


def _factor(dim: int) -> float:
    """By which a product becomes a power of two."""
    return math.log2(math.e) * dim**-0.5


def _iota(size: int) -> Int[Array, " size"]:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)
