"""The exact products, in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def products(
    x: Float[Array, "E M K"], numbers: Float[Array, "E N K"], scale: Float[Array, "E N"]
) -> Float[Array, "E M N"]:
    """See `api.products`."""
    sums = jnp.einsum(
        "emk,enk->emn", x, numbers.astype(x.dtype), preferred_element_type=jnp.float32
    )
    return (sums * scale[:, None]).astype(x.dtype)
