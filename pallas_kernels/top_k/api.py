"""Exact top-K selection."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.top_k import reference, tpu, triton

# Traced and lowered once for all groups of layers: see `sparse_attention.api`.
_triton = jax.jit(triton.top_k, static_argnums=1)
_tpu = jax.jit(tpu.top_k, static_argnums=1)


def top_k(
    scores: Float[Array, "R T C"], k: int, *, backend: Backend | None = None
) -> Int[Array, "R T K"]:
    """The set of the `k` largest scores of each query, ties to the lowest position.

    Args:
        scores: float32 without NaN; -inf marks positions that may not be selected. 0.0 equals -0.0.
        k: how many positions to select, at most C.
        backend: the implementation; by default the one for the device JAX runs on, as far as
            its `supports` says so.

    Returns:
        int32 positions in ascending order; NO_SLOT at the end where fewer than `k` are selectable.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.top_k.api import top_k
        >>> top_k(jnp.array([[[0.5, 2.0, -jnp.inf, 0.5]]]), 2)
        Array([[[0, 1]]], dtype=int32)
    """
    refusal = triton.supports(scores.shape[2], k)
    match resolve("top_k", backend, refusal=refusal, tpu_refusal=tpu.supports(scores.shape[2], k)):
        case "tpu":
            return _tpu(scores, k)
        case "triton":
            return _triton(scores, k)
        case _:
            return reference.top_k(scores, k)
