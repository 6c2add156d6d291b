"""Normalisation, computed in float32 whatever the compute dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def _along_last(weight: Float[Array, " width"], ndim: int) -> Float[Array, "..."]:
    """A float32 view of `weight` that broadcasts against the last of `ndim` axes."""
    return weight.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def normalised(x: Float[Array, "*batch width"], epsilon: float) -> Float[Array, "*batch width"]:
    """`x / rms(x)` over the last axis, without weights."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


class RmsNorm(nnx.Module):
    """`x / rms(x) * weight` over the last axis; the result has the compute dtype."""

    def __init__(
        self, width: int, *, epsilon: float, dtype: jnp.dtype, param_dtype: jnp.dtype
    ) -> None:
        self.weight = nnx.Param(jnp.ones((width,), param_dtype))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalises `x`."""
        x = x.astype(jnp.float32)
        scaled = normalised(x, self.epsilon) * _along_last(self.weight[...], x.ndim)
        return scaled.astype(self.dtype)


class LayerNorm(nnx.Module):
    """Mean and variance normalisation with weight and bias over the last axis."""

    def __init__(
        self, width: int, *, epsilon: float, dtype: jnp.dtype, param_dtype: jnp.dtype
    ) -> None:
        self.weight = nnx.Param(jnp.ones((width,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((width,), param_dtype))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalises `x`."""
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scaled = x * inverse * _along_last(self.weight[...], x.ndim)
        return (scaled + _along_last(self.bias[...], x.ndim)).astype(self.dtype)
