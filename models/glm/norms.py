"""Normalisation, computed in float32 whatever the compute dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped


def along_last(vector: Shaped[Array, " width"], ndim: int) -> Shaped[Array, "..."]:
    """A vector that goes with the last of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


def _wide(weight: Float[Array, " width"], ndim: int) -> Float[Array, "..."]:
    return along_last(weight.astype(jnp.float32), ndim)


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
        scaled = normalised(x, self.epsilon) * _wide(self.weight[...], x.ndim)
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
        scaled = x * inverse * _wide(self.weight[...], x.ndim)
        return (scaled + _wide(self.bias[...], x.ndim)).astype(self.dtype)
