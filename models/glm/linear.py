"""The one way to make a weight matrix: fan-in scaled initial values, a bias only if asked for."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer, normal


def weight_init(fan_in: int) -> Initializer:
    """Keeps the size of activations: normal with variance `1 / fan_in`."""
    return normal(fan_in**-0.5)


def residual_init(fan_in: int, num_layers: int) -> Initializer:
    """For matrices that write to the residual stream, of which a model has `2 num_layers`."""
    return normal((2 * num_layers * fan_in) ** -0.5)


def linear(
    fan_in: int,
    fan_out: int,
    *,
    dtype: jnp.dtype,
    param_dtype: jnp.dtype,
    rngs: nnx.Rngs,
    kernel_init: Initializer | None = None,
    bias: bool = False,
) -> nnx.Linear:
    """A projection with kernel `[fan_in, fan_out]`, computed in `dtype`."""
    return nnx.Linear(
        fan_in,
        fan_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=kernel_init or weight_init(fan_in),
        rngs=rngs,
    )


def exact_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` in float32 without a lower-precision shortcut on any backend."""
    return jnp.matmul(
        x.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
