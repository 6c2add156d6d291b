"""Index scores: how relevant every position of the history is to every query."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.index_scores import mosaic, reference, tpu, triton
from pallas_kernels.index_scores.types import Keys

# Traced and lowered once for all groups of layers: see `sparse_attention.api`.
_mosaic = jax.jit(mosaic.index_scores)
_triton = jax.jit(triton.index_scores)
_tpu = jax.jit(tpu.index_scores)


def index_scores(
    queries: Float[Array, "R T heads width"],
    weights: Float[Array, "R T heads"],
    keys: Keys,
    visible: Int[Array, "R T"],
    *,
    backend: Backend | None = None,
) -> Float[Array, "R T C"]:
    """Scores of the lightning indexer: `sum_h weights_h * relu(query_h . key)` in float32.

    Source: DeepSeek-V3.2, section 2.1 (lightning indexer). The constant factors
    `heads**-0.5 * width**-0.5` belong into `weights`.

    Args:
        queries: rotated indexer queries, any float dtype.
        weights: float32 weight of each indexer head.
        keys: index keys of the whole history: numbers of the queries' dtype, or fp8 numbers with
            scales (`types.ScaledKeys`), which stand for exactly `scale * number`, or words of 4-bit
            numbers (`types.packed_format`), likewise; no kernel takes those. Beyond `visible`
            they may hold anything, NaN included: it does not reach a score. The Mosaic kernel
            copies histories first that are not a multiple of 8 long.
        visible: int32, how many positions each query sees: position s is seen iff s < visible.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these. On a GPU: `mosaic` for bfloat16 and fp8 keys, `triton` for float32.

    Returns:
        float32 scores; -inf where the position is not visible.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    kernel = triton if queries.dtype == jnp.float32 else mosaic
    name: Backend = "triton" if kernel is triton else "mosaic"
    refusal = kernel.supports(queries, keys)
    tpu_refusal = tpu.supports(queries, keys)
    match resolve("index_scores", backend, refusal=refusal, kernel=name, tpu_refusal=tpu_refusal):
        case "tpu":
            return _tpu(queries, weights, keys, visible)
        case "mosaic":
            return _mosaic(queries, weights, keys, visible)
        case "triton":
            return _triton(queries, weights, keys, visible)
        case _:
            return reference.index_scores(queries, weights, keys, visible)
