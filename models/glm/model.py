"""GLM-5.x as Flax NNX modules: weights and per-layer parts, without a cache.

The parts are put together by `models.glm.dense` (whole sequences) and `models.glm.decode`
(one step over the KV hierarchy).
"""

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.attention import MlaAttention
from dhisparse_jax.models.glm.indexer import Indexer
from dhisparse_jax.models.glm.linear import linear
from dhisparse_jax.models.glm.moe import GatedMlp, MoeMlp
from dhisparse_jax.models.glm.norms import RmsNorm


class GlmBlock(nnx.Module):
    """One layer: `h += attention(input_norm(h))`, then `h += mlp(post_norm(h))`.

    Attributes:
        indexer: Present in the first layer of a selection group, else None.
    """

    def __init__(self, config: GlmConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm_args = {
            "epsilon": config.norm_eps,
            "dtype": dtype,
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        self.input_norm = RmsNorm(config.hidden_size, **norm_args)
        self.attention = MlaAttention(config, dtype=dtype, rngs=rngs)
        full = config.indexer_types[layer] == "full"
        self.indexer = Indexer(config, dtype=dtype, rngs=rngs) if full else None
        self.post_norm = RmsNorm(config.hidden_size, **norm_args)
        if layer < config.num_dense_layers:
            self.mlp = GatedMlp(config, config.dense_intermediate_size, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MoeMlp(config, dtype=dtype, rngs=rngs)


class GlmModel(nnx.Module):
    """All weights of a GLM-5.x model, kept as `nnx.Param`.

    Args:
        config: Sizes. `config.param_dtype` is the dtype of the weights.
        rngs: Source of the initial values.
        dtype: Compute dtype; float32 for verification. Router, norms, index scores, softmax and
            logits are float32 whatever it is.
    """

    def __init__(
        self, config: GlmConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32
    ) -> None:
        dtype = jnp.dtype(dtype)
        param_dtype = jnp.dtype(config.param_dtype)
        self.config = config
        self.dtype = dtype
        shape = (config.vocab_size, config.hidden_size)
        init = normal(config.hidden_size**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.layers = nnx.List(
            GlmBlock(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)
        )
        self.norm = RmsNorm(
            config.hidden_size, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.head = linear(
            config.hidden_size,
            config.vocab_size,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        """Residual stream before the first layer."""
        return self.embedding[...][tokens].astype(self.dtype)

    def logits(self, h: Float[Array, "*batch width"]) -> Float[Array, "*batch vocab"]:
        """Float32 next-token logits from the residual stream after the last layer."""
        return self.head(self.norm(h)).astype(jnp.float32)
