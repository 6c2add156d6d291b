"""Index scores of float32 keys on a GPU: the query stays, the keys stream past it once.

The matrix units of the Mosaic kernel multiply float32 only after rounding it to tf32, and a
selection from rounded scores is another selection. Triton multiplies it exactly, in the ordinary
units. Float32 is what results are compared in, not what production runs; so this kernel is simple,
and reads the keys once per query.

One program scores some queries of a request, all heads, against a run of positions. Their numbers
and weights are read once; then, block by block, keys are multiplied with all of them and the
products weighted and summed in registers. Blocks that no query sees are not read: they only get
their -inf. Runs are as short as keep all units busy: a block takes long, since its products are
taken one after the other.

What would have to change when Pallas-Triton goes: the Mosaic kernel with products outside of the
matrix units.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.index_scores.types import Keys, ScaledKeys

MOST_WIDTH = 128
"""Numbers of a key: a block of longer ones does not fit into registers."""
MOST_HEADS = 64
LEAST_SIDE = 16
"""Least rows and columns of a matrix operand."""
MOST_COLUMNS = 64
"""Queries times heads of a program; more take too many registers."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
        block: positions per step of a program.
        programs: how many there should be at least, if there are so many blocks.
        warps: warps of a program.
    """

    block: int = 32
    programs: int = 1024
    warps: int = 4


def supports(queries: Float[Array, "R T heads width"], keys: Keys) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, _, heads, width = queries.shape
    if queries.dtype != jnp.float32 or keys.dtype != jnp.float32:
        return f"queries of {queries.dtype} with keys of {keys.dtype} (only float32)"
    if width > MOST_WIDTH:
        return f"keys of {width} numbers (at most {MOST_WIDTH})"
    if heads > MOST_HEADS:
        return f"{heads} heads (at most {MOST_HEADS})"
    return None


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "R T C"]:
    """See `api.index_scores`. `interpret` runs the kernel as plain XLA operations."""
    if isinstance(keys, ScaledKeys):
        raise NotImplementedError(supports(queries, keys))
    requests, count, heads, width = queries.shape
    positions = keys.shape[1]
    tuning = tuning or Tuning()
    heads_more = pl.next_power_of_2(heads) - heads
    together = _together(count, heads + heads_more)
    more = -count % together
    queries = jnp.pad(
        queries, ((0, 0), (0, more), (0, heads_more), (0, _side(width) - width))
    ).reshape(requests, -1, together * (heads + heads_more), _side(width))
    weights = jnp.pad(weights, ((0, 0), (0, more), (0, heads_more)))
    visible = jnp.pad(visible, ((0, 0), (0, more)))
    blocks = pl.cdiv(positions, tuning.block)
    steps = max(1, requests * queries.shape[1] * blocks // tuning.programs)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_scores_kernel, together=together, steps=steps, block=tuning.block),
        grid=(queries.shape[1], pl.cdiv(blocks, steps), requests),
        in_specs=[whole] * 4,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((requests, count, positions), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="index_scores",
    )
    return call(queries, weights.reshape(*queries.shape[:3]), visible, keys)


def _side(size: int) -> int:
    """The matrix side that holds `size` rows or columns."""
    return max(LEAST_SIDE, pl.next_power_of_2(size))


def _together(count: int, heads: int) -> int:
    """Queries of a program, a power of two: with 4 heads, 4 of 1 to 4 queries, and 8 of 8."""
    most = max(1, MOST_COLUMNS // heads)
    return max(LEAST_SIDE // heads, min(pl.next_power_of_2(count), most))


def _scores_kernel(
    queries_ref: jax.Ref,
    weights_ref: jax.Ref,
    visible_ref: jax.Ref,
    keys_ref: jax.Ref,
    scores_ref: jax.Ref,
    *,
    together: int,
    steps: int,
    block: int,
) -> None:
    """The scores of one run of positions for some queries."""
    several, request = pl.program_id(0), pl.program_id(2)
    _, count, positions = scores_ref.shape
    start = pl.program_id(1) * block * steps
    query = several * together + jnp.arange(together, dtype=jnp.int32)
    visible = jnp.minimum(plgpu.load(visible_ref.at[request, query]), positions)
    seen = visible.max()
    numbers, weights = queries_ref[request, several], weights_ref[request, several]

    def store(step: Int[Array, ""], scores: Float[Array, "b q"]) -> tuple[()]:
        position = (start + step * block + jnp.arange(block, dtype=jnp.int32))[:, None]
        shown = jnp.where(position < visible[None], scores, -jnp.inf)
        inside = (position < positions) & (query[None] < count)
        plgpu.store(scores_ref.at[request, query[None], position], shown, mask=inside)
        return ()

    def score(step: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        position = start + step * block + jnp.arange(block, dtype=jnp.int32)
        keys = _load_keys(keys_ref, request, position, seen)
        return store(step, _weighted(keys, numbers, weights, together))

    def hide(step: Int[Array, ""], _: tuple[()]) -> tuple[()]:
        return store(step, jnp.full((block, together), -jnp.inf))

    shown = jnp.clip(pl.cdiv(seen - start, block), 0, steps)
    lax.fori_loop(0, shown, score, ())
    lax.fori_loop(shown, steps, hide, ())


def _load_keys(
    ref: jax.Ref, request: Int[Array, ""], position: Int[Array, " b"], seen: Int[Array, ""]
) -> Float[Array, "b numbers"]:
    """Keys of a block; zeros for positions that the query does not see, which are not read."""
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
    together: int,
) -> Float[Array, "b q"]:
    """`sum_h weights_h * relu(query_h . key)` of every query."""
    dots = jnp.dot(
        keys, queries.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    weighted = jnp.maximum(dots, 0.0) * weights[None]
    return weighted.reshape(keys.shape[0], together, -1).sum(axis=2)
