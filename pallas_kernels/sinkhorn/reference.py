"""The same in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sinkhorn(
    logits: Float[Array, "*n size size"], *, steps: int, epsilon: float
) -> Float[Array, "*n size size"]:
    """See `api.sinkhorn`."""
    by = lambda c, axis: c / (jnp.sum(c, axis=axis, keepdims=True) + epsilon)
    carry = by(jax.nn.softmax(logits, axis=-1) + epsilon, -2)
    # A loop: unrolled, these steps would be most of what has to be compiled of a model.
    return jax.lax.fori_loop(1, steps, lambda _, c: by(by(c, -1), -2), carry)
