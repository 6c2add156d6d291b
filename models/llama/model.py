"""Llama-like models as Flax NNX modules: weights and per-layer parts, without a cache.

The parts are put together by `models.llama.whole` (whole texts) and `models.llama.decode` (one step
over the KV hierarchy).
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.llama import LlamaConfig
from dhisparse_jax.models.glm.linear import linear, residual_init
from dhisparse_jax.models.glm.moe import GatedMlp
from dhisparse_jax.models.glm.norms import RmsNorm
from dhisparse_jax.models.glm.rope import rotate


class Heads(NamedTuple):
    """What attention is made of: rotated queries and keys, and values."""

    queries: Float[Array, "*batch heads head"]
    keys: Float[Array, "*batch kv_heads head"]
    values: Float[Array, "*batch kv_heads head"]


class LlamaLayer(nnx.Module):
    """One layer: `x += o(attention(norm(x)))`, then `x += mlp(norm(x))`."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, param_dtype = config.hidden_size, jnp.dtype(config.param_dtype)
        args = {"dtype": dtype, "param_dtype": param_dtype}
        norm = {"epsilon": config.norm_eps, **args}
        inner, kept = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.input_norm = RmsNorm(width, **norm)
        self.q = linear(width, inner, **args, rngs=rngs)
        self.k = linear(width, kept, **args, rngs=rngs)
        self.v = linear(width, kept, **args, rngs=rngs)
        out_init = residual_init(inner, config.num_layers)
        self.o = linear(inner, width, kernel_init=out_init, **args, rngs=rngs)
        self.post_norm = RmsNorm(width, **norm)
        self.mlp = GatedMlp(config, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.head_dim, self.theta, self.style = (
            config.head_dim,
            config.rope_theta,
            config.rope_style,
        )

    def project(
        self, normed: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> Heads:
        """Queries, keys and values from the normalised residual stream."""
        lead = normed.shape[:-1]
        queries, keys, values = (
            part(normed).reshape(*lead, -1, self.head_dim) for part in (self.q, self.k, self.v)
        )
        each = positions[..., None]  # the heads of a position share it
        queries, keys = (
            rotate(x, each, theta=self.theta, style=self.style) for x in (queries, keys)
        )
        return Heads(queries, keys, values)

    def finish(
        self, x: Float[Array, "*batch width"], attended: Float[Array, "*batch heads head"]
    ) -> Float[Array, "*batch width"]:
        """The residual stream after the layer, from that before it and what its heads read."""
        x = x + self.o(attended.reshape(*x.shape[:-1], -1))
        return x + self.mlp(self.post_norm(x))


class LlamaModel(nnx.Module):
    """All weights of a model, kept as `nnx.Param`.

    Args:
        config: Sizes.
        rngs: Source of the initial values.
        dtype: Compute dtype. Norms, softmax and logits are float32 whatever it is.
    """

    def __init__(
        self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32
    ) -> None:
        dtype, param_dtype = jnp.dtype(dtype), jnp.dtype(config.param_dtype)
        self.config = config
        self.dtype = dtype
        shape = (config.vocab_size, config.hidden_size)
        init = normal(config.hidden_size**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.layers = nnx.List(
            LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)
        )
        self.norm = RmsNorm(
            config.hidden_size, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.head = None if config.tied else nnx.Param(init(rngs.params(), shape, param_dtype))

    def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        """Residual stream before the first layer."""
        return self.embedding[...][tokens].astype(self.dtype)

    def logits(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch vocab"]:
        """Float32 next-token logits from the residual stream after the last layer."""
        head = self.embedding if self.head is None else self.head
        kernel = head[...].astype(self.dtype)
        return jnp.einsum("...d,vd->...v", self.norm(x), kernel).astype(jnp.float32)
