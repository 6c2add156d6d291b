"""The indexer of a layer: scores that say which entries a query attends to."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v4 import V4Config, V4Sizes
from dhisparse_jax.models.deepseek_v4.compressor import Compressor
from dhisparse_jax.models.deepseek_v4.rotary import Rotary
from dhisparse_jax.models.glm.linear import exact_dot, linear, weight_init


class IndexQueries(nnx.Module):
    """Queries and head weights."""

    def __init__(
        self, config: V4Sizes, *, rotary: Rotary, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        heads, width = config.index_heads, config.index_dim
        param_dtype = jnp.dtype(config.param_dtype)
        self.wq = linear(
            config.q_lora_rank, heads * width, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        init, shape = weight_init(config.hidden_size), (config.hidden_size, heads)
        self.head_weights = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.rotary, self.heads = rotary, heads
        self.scale = (heads * width) ** -0.5

    def queries(
        self, q_lora: Float[Array, "*batch q_lora"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch index_heads index_dim"]:
        """Index queries from the normalised query latent of the layer."""
        q = self.wq(q_lora).reshape(*q_lora.shape[:-1], self.heads, -1)
        return self.rotary.rotate_last(q, positions[..., None])

    def weights(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch index_heads"]:
        """Float32 head weights, already multiplied by `index_heads^-0.5 * index_dim^-0.5`."""
        return exact_dot(x, self.head_weights[...]) * self.scale


class Indexer(IndexQueries):
    """The indexer of a "selected" layer: keys are the entries of a compressor of its own."""

    def __init__(
        self, config: V4Config, *, rotary: Rotary, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, rotary=rotary, dtype=dtype, rngs=rngs)
        self.compressor = Compressor(
            config,
            config.index_dim,
            config.selected_rate,
            overlap=True,
            rotary=rotary,
            dtype=dtype,
            rngs=rngs,
        )
