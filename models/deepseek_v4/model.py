"""DeepSeek-V4 as Flax NNX modules: weights and per-layer parts, without a cache.

`models.deepseek_v4.decode` puts the parts together over the KV hierarchy.
"""

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.models.deepseek_v4.attention import V4Attention
from dhisparse_jax.models.deepseek_v4.hyper import HyperConnection, HyperHead
from dhisparse_jax.models.deepseek_v4.moe import V4Moe
from dhisparse_jax.models.glm.linear import linear
from dhisparse_jax.models.glm.norms import RmsNorm


class V4Block(nnx.Module):
    """One layer: attention and experts, each connected to all streams."""

    def __init__(self, config: V4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm_args = {
            "epsilon": config.norm_eps,
            "dtype": dtype,
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        self.attention_hyper = HyperConnection(config, rngs=rngs)
        self.attention_norm = RmsNorm(config.hidden_size, **norm_args)
        self.attention = V4Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_hyper = HyperConnection(config, rngs=rngs)
        self.mlp_norm = RmsNorm(config.hidden_size, **norm_args)
        self.mlp = V4Moe(config, dtype=dtype, rngs=rngs, hashed=layer < config.num_hash_layers)


class V4Model(nnx.Module):
    """All weights of a DeepSeek-V4 model, kept as `nnx.Param`.

    Args:
        config: Sizes. `config.param_dtype` is the dtype of the weights.
        rngs: Source of the initial values.
        dtype: Compute dtype; float32 for verification. Compressors, connections, router, norms,
            index scores, softmax and logits are float32 whatever it is.
    """

    def __init__(
        self, config: V4Config, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32
    ) -> None:
        dtype, param_dtype = jnp.dtype(dtype), jnp.dtype(config.param_dtype)
        self.config = config
        self.dtype = dtype
        shape = (config.vocab_size, config.hidden_size)
        init = normal(config.hidden_size**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.layers = nnx.List(
            V4Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)
        )
        self.hyper_head = HyperHead(config, rngs=rngs)
        self.norm = RmsNorm(
            config.hidden_size, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.head = linear(
            config.hidden_size, config.vocab_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch streams width"]:
        """The streams before the first layer: all the same."""
        x = self.embedding[...][tokens].astype(self.dtype)
        return jnp.repeat(x[..., None, :], self.config.streams, axis=-2)

    def logits(self, x: Float[Array, "*batch streams width"]) -> Float[Array, "*batch vocab"]:
        """Float32 next-token logits from the streams after the last layer."""
        return self.head(self.norm(self.hyper_head(x))).astype(jnp.float32)
