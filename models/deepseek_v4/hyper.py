"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed at every sublayer.

With streams X_j, a sublayer f reads x = sum_j pre_j X_j and writes
X_k <- post_k f(x) + sum_j C[j, k] X_j, where pre, post and C follow from the streams themselves,
and C is nearly doubly stochastic. Source: the DeepSeek-V4 report, section 2.2.

All of it is float32 whatever the compute dtype.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dhisparse_jax.configs.deepseek_v4 import V4Sizes
from dhisparse_jax.models.glm.linear import exact_dot, weight_init
from dhisparse_jax.models.glm.norms import along_last
from pallas_kernels.sinkhorn.api import sinkhorn

Streams = Float[Array, "*batch streams width"]


class Mixing(NamedTuple):
    """What the streams say about one sublayer.

    Attributes:
        pre: weights of the streams in the sublayer's input.
        post: weights of its output in the streams.
        carry: C; row j says where stream j goes.
    """

    pre: Float[Array, "*batch streams"]
    post: Float[Array, "*batch streams"]
    carry: Float[Array, "*batch streams streams"]


class HyperConnection(nnx.Module):
    """The connection of one sublayer.

    Attributes:
        fn: from all streams to the logits of pre, post and C, side by side.
        base: what is added to them.
        scale: factors of the three.
    """

    def __init__(self, config: V4Sizes, *, rngs: nnx.Rngs) -> None:
        streams, width = config.streams, config.streams * config.hidden_size
        outputs = (2 + streams) * streams
        init = weight_init(width)
        self.fn = nnx.Param(init(rngs.params(), (width, outputs), jnp.float32))
        self.base = nnx.Param(jnp.zeros((outputs,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((3,), jnp.float32))
        self.streams, self.steps = streams, config.sinkhorn_steps
        self.epsilon, self.norm_eps = config.hc_eps, config.norm_eps

    def mixing(self, x: Streams) -> Mixing:
        """How the sublayer is connected to these streams."""
        n = self.streams
        mix = _flat_logits(x, self.fn[...], self.norm_eps)
        ends = (n, 2 * n, (2 + n) * n)
        parts = jnp.split(mix, ends[:2], axis=-1)
        base, scale = jnp.split(self.base[...], ends[:2]), self.scale[...]
        pre, post, carry = (
            part * scale[i] + along_last(base[i], mix.ndim) for i, part in enumerate(parts)
        )
        return Mixing(
            pre=jax.nn.sigmoid(pre) + self.epsilon,
            post=2 * jax.nn.sigmoid(post),
            carry=sinkhorn(
                carry.reshape(*mix.shape[:-1], n, n), steps=self.steps, epsilon=self.epsilon
            ),
        )


class HyperHead(nnx.Module):
    """The weighted sum of the streams after the last layer."""

    def __init__(self, config: V4Sizes, *, rngs: nnx.Rngs) -> None:
        width = config.streams * config.hidden_size
        init = weight_init(width)
        self.fn = nnx.Param(init(rngs.params(), (width, config.streams), jnp.float32))
        self.base = nnx.Param(jnp.zeros((config.streams,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((1,), jnp.float32))
        self.epsilon, self.norm_eps = config.hc_eps, config.norm_eps

    def __call__(self, x: Streams) -> Float[Array, "*batch width"]:
        """One stream, float32."""
        logits = _flat_logits(x, self.fn[...], self.norm_eps) * self.scale[0]
        base = along_last(self.base[...], logits.ndim)
        return collapsed(x, jax.nn.sigmoid(logits + base) + self.epsilon)


def collapsed(x: Streams, weights: Float[Array, "*batch streams"]) -> Float[Array, "*batch width"]:
    """`sum_j weights_j X_j`, float32."""
    return jnp.sum(x.astype(jnp.float32) * weights[..., None], axis=-2)


def mean_stream(x: Streams) -> Float[Array, "*batch width"]:
    """The mean of the streams, in their dtype."""
    return jnp.mean(x.astype(jnp.float32), axis=-2).astype(x.dtype)


def connected(
    x: Streams, update: Float[Array, "*batch width"], mixing: Mixing
) -> Float[Array, "*batch streams width"]:
    """The streams after a sublayer: `post_k update + sum_j C[j, k] X_j`, in the dtype of `x`."""
    # Not a product of matrices as small as these: this way it is one kernel that reads x once.
    wide = x.astype(jnp.float32)
    total = mixing.post[..., None] * update.astype(jnp.float32)[..., None, :]
    for stream in range(x.shape[-2]):
        total = total + mixing.carry[..., stream, :, None] * wide[..., stream : stream + 1, :]
    return total.astype(x.dtype)


def _flat_logits(
    x: Streams, fn: Float[Array, "flat outputs"], epsilon: float
) -> Float[Array, "*batch outputs"]:
    """All streams, normalised together without weights, times a matrix; divided after the sum."""
    flat = x.reshape(*x.shape[:-2], -1).astype(jnp.float32)
    squares = jnp.mean(jnp.square(flat), axis=-1, keepdims=True)
    return exact_dot(flat, fn) * jax.lax.rsqrt(squares + epsilon)
