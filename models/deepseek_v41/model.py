"""DeepSeek-V4.1 as Flax NNX modules: weights and per-layer parts, without a cache.

`models.deepseek_v41.decode` puts the parts together over the KV hierarchy.
"""

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.models.deepseek_v4.hyper import HyperConnection, Streams, collapsed
from dhisparse_jax.models.deepseek_v4.moe import V4Moe
from dhisparse_jax.models.deepseek_v41.attention import V41Attention
from dhisparse_jax.models.deepseek_v41.engram import Engram
from dhisparse_jax.models.glm.linear import linear
from dhisparse_jax.models.glm.norms import RmsNorm


class V41Block(nnx.Module):
    """One layer: attention and experts, each connected to all streams, maybe a memory before."""

    def __init__(self, config: V41Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm_args = {
            "epsilon": config.norm_eps,
            "dtype": dtype,
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        known = layer in config.engram_layers
        self.engram = Engram(config, layer, dtype=dtype, rngs=rngs) if known else None
        self.attention_hyper = HyperConnection(config, rngs=rngs)
        self.attention_norm = RmsNorm(config.hidden_size, **norm_args)
        self.attention = V41Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_hyper = HyperConnection(config, rngs=rngs)
        self.mlp_norm = RmsNorm(config.hidden_size, **norm_args)
        self.mlp = V4Moe(config, dtype=dtype, rngs=rngs)


class V41Model(nnx.Module):
    """All weights of a DeepSeek-V4.1 model, kept as `nnx.Param`.

    Args:
        config: Sizes. `config.param_dtype` is the dtype of the weights.
        rngs: Source of the initial values.
        dtype: Compute dtype; float32 for verification. Sums of compressors, connections, memory
            gates, router, norms, index scores, softmax and logits are float32 whatever it is.

    Attributes:
        word_of: int32 id of every token in the tables of n-grams; None without such tables.
    """

    def __init__(
        self, config: V41Config, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32
    ) -> None:
        dtype, param_dtype = jnp.dtype(dtype), jnp.dtype(config.param_dtype)
        self.config = config
        self.dtype = dtype
        shape = (config.vocab_size, config.hidden_size)
        init = normal(config.hidden_size**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))
        ids = jnp.arange(config.vocab_size, dtype=jnp.int32) % config.engram_vocab
        self.word_of = nnx.Param(ids) if config.engram_layers else None
        self.layers = nnx.List(
            V41Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)
        )
        self.norm = RmsNorm(
            config.hidden_size, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.head = linear(
            config.hidden_size, config.vocab_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def embed(self, tokens: Int[Array, "*batch"]) -> Streams:
        """The streams before the first layer: all the same."""
        x = self.embedding[...][tokens].astype(self.dtype)
        return jnp.repeat(x[..., None, :], self.config.streams, axis=-2)

    def words(
        self, tokens: Int[Array, "*batch order"], there: Bool[Array, "*batch order"]
    ) -> Int[Array, "*batch order"]:
        """Ids of tokens in the tables of n-grams; that of the pad where there is no token."""
        assert self.word_of is not None  # the model has such tables
        return self.word_of[...][jnp.where(there, tokens, self.config.engram_pad_id)]

    def logits(
        self, x: Streams, pre: Float[Array, "*batch streams"]
    ) -> Float[Array, "*batch vocab"]:
        """Float32 next-token logits from the streams after the last layer, and their weights."""
        return self.head(self.norm(collapsed(x, pre))).astype(jnp.float32)
