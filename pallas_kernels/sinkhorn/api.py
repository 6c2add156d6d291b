"""Small matrices, made nearly doubly stochastic from logits."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.sinkhorn import reference, triton

# Traced and lowered once for all layers: see `sparse_attention.api`.
_triton = jax.jit(triton.sinkhorn, static_argnames=("steps", "epsilon"))


def sinkhorn(
    logits: Float[Array, "*n size size"],
    *,
    steps: int,
    epsilon: float,
    backend: Backend | None = None,
) -> Float[Array, "*n size size"]:
    """Rows by softmax, then columns and rows in turn, each divided by its sum plus `epsilon`.

    Source: Sinkhorn and Knopp (1967); DeepSeek-V4, section 2.2, which adds `epsilon` to the softmax
    as well.

    Args:
        logits: float32.
        steps: how often columns are divided; rows are once less, beside the softmax.
        epsilon: keeps sums from being zero.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        float32; backends differ in the order of sums.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    match resolve("sinkhorn", backend, refusal=triton.supports(logits)):
        case "triton":
            return _triton(logits, steps=steps, epsilon=epsilon)
        case _:
            return reference.sinkhorn(logits, steps=steps, epsilon=epsilon)
