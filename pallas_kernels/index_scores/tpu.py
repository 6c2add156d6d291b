"""Index scores on a TPU: the queries stay in VMEM, the keys stream past them once.

A program of the grid scores some queries of a request, all heads, against a block of positions. The
pipeline of `pallas_call` brings the next block of keys from HBM while this one is multiplied. The
products of a block, `[queries * heads, positions]`, are one matrix product with float32
accumulation; they are weighted and summed over the heads in the vector unit, and never leave VMEM.

How far a request is seen is known before its keys are addressed (scalar prefetch): blocks beyond
that are not read, since their programs name the block that is there already; they only write -inf.

Traffic: keys once per group of `Tuning.together` queries (one group up to T = 8), scores once. With
C positions of 128 numbers that is 256 C bytes per request in bfloat16, 132 C in fp8 and 4 T C for
the scores. The scales of fp8 keys move twice more: a run of them is one row of `[R, C]`, of which a
block has to hold eight, so they become `[R, 1, C]` first (9 % of the bytes of the keys).

Tiles: 2,048 positions for one query of GLM (512 KB of bfloat16 keys, 32 x 2,048 products); 1,024
for eight (256 x 1,024 products, 1 MB).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.record_layout import LANES
from pallas_kernels.index_scores.types import Keys, ScaledKeys

SUBLANES = 8
"""Rows of a tile of 32-bit numbers: sums over whole tiles move nothing between them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut.

    Attributes:
        together: queries of a program, if there are more; a multiple of 8.
        products: products of a program at most, so that they and their temporaries fit into VMEM.
        block: positions of a program at most; a multiple of 128.
    """

    together: int = 8
    products: int = 1 << 18
    block: int = 2048


def supports(queries: Float[Array, "R T heads width"], keys: Keys) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    scaled = isinstance(keys, ScaledKeys)
    wanted = jnp.bfloat16 if scaled else keys.dtype
    if queries.dtype == wanted and (scaled or keys.dtype in (jnp.bfloat16, jnp.float32)):
        return None
    pair = f"queries of {queries.dtype} with keys of {keys.dtype}"
    return f"{pair} (only bfloat16 with bfloat16 or fp8, and float32)"


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    *,
    tuning: Tuning | None = None,
) -> Float[Array, "R T C"]:
    """See `api.index_scores`."""
    tuning = tuning or Tuning()
    requests, count, heads, _ = queries.shape
    positions = keys.shape[1]
    together = count if count <= tuning.together else tuning.together
    more, heads_more = -count % together, -heads % SUBLANES
    queries = jnp.pad(queries, ((0, 0), (0, more), (0, heads_more), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, more), (0, heads_more)))[..., None]
    visible = jnp.pad(jnp.minimum(visible, positions), ((0, 0), (0, more)))
    groups = visible.shape[1] // together
    seen = visible.reshape(requests * groups, together).max(axis=1)
    fit = min(tuning.block, tuning.products // (together * queries.shape[2]))
    block = positions if positions <= fit else fit // LANES * LANES
    operands = [queries, weights, visible[..., None]]
    operands += [keys.numbers, keys.scales[:, None]] if isinstance(keys, ScaledKeys) else [keys]
    call = pl.pallas_call(
        functools.partial(_scores_kernel, groups=groups, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(requests, groups, pl.cdiv(positions, block)),
            in_specs=[
                *(_of_queries(together, operand.shape[2:]) for operand in operands[:3]),
                *_of_keys(operands[3:], groups, block),
            ],
            out_specs=pl.BlockSpec((None, together, block), lambda r, g, c, _: (r, g, c)),
        ),
        out_shape=jax.ShapeDtypeStruct((requests, groups * together, positions), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * queries.size * positions,
            bytes_accessed=sum(each.size * each.dtype.itemsize for each in operands)
            + 4 * visible.size * positions,
            transcendentals=0,
        ),
        interpret=tpu_interpret(),
        name="index_scores",
    )
    return call(seen, *operands)[:, :count]


def _of_queries(together: int, sizes: tuple[int, ...]) -> pl.BlockSpec:
    """What a program has of an array of all queries."""
    return pl.BlockSpec((None, together, *sizes), lambda r, g, c, _: (r, g, *(0 for _ in sizes)))


def _of_keys(keys: list[Array], groups: int, block: int) -> list[pl.BlockSpec]:
    """What a program has of numbers, and of scales: of hidden blocks, the last one that is not."""

    def shown(
        request: Int[Array, ""], group: Int[Array, ""], number: Int[Array, ""], seen: jax.Ref
    ) -> Int[Array, ""]:
        last = jnp.maximum(pl.cdiv(seen[request * groups + group], block) - 1, 0)
        return jnp.minimum(number, last)

    numbers = pl.BlockSpec((None, block, keys[0].shape[2]), lambda r, *at: (r, shown(r, *at), 0))
    scales = pl.BlockSpec((None, 1, block), lambda r, *at: (r, 0, shown(r, *at)))
    return [numbers, scales][: len(keys)]


def _scores_kernel(
    seen_ref: jax.Ref,  # [R * groups], in SMEM
    queries_ref: jax.Ref,  # [t, heads, width]
    weights_ref: jax.Ref,  # [t, heads, 1]
    visible_ref: jax.Ref,  # [t, 1]
    keys_ref: jax.Ref,  # [block, width]
    *others: jax.Ref,  # [1, block], if keys have scales; [t, block]
    groups: int,
    block: int,
) -> None:
    """The scores of one block of positions for some queries of a request."""
    *scales, scores_ref = others
    start = pl.program_id(2) * block
    shown = start < seen_ref[pl.program_id(0) * groups + pl.program_id(1)]

    @pl.when(shown)
    def _score() -> None:
        scores = _weighted(queries_ref[...], weights_ref[...], keys_ref[...])
        if scales:
            # One factor of every product of a key, and not negative: it may as well come last.
            scores = scores * scales[0][...]
        position = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores_ref[...] = jnp.where(position < visible_ref[...], scores, -jnp.inf)

    @pl.when(jnp.logical_not(shown))
    def _hide() -> None:
        scores_ref[...] = jnp.full(scores_ref.shape, -jnp.inf, jnp.float32)


def _weighted(
    queries: Float[Array, "t heads width"],
    weights: Float[Array, "t heads 1"],
    keys: Float[Array, "block width"],
) -> Float[Array, "t block"]:
    """`sum_h weights_h * relu(query_h . number)` of every query."""
    count, heads, width = queries.shape
    dots = lax.dot_general(
        queries.reshape(count * heads, width),
        keys.astype(queries.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    weighted = jnp.maximum(dots, 0.0).reshape(count, heads, -1) * weights
    return weighted.sum(axis=1)
