"""Attention of one layer: that of DeepSeek-V4, with entries that several layers share.

A source of entries makes a latent of every stretch of positions: the normalised sum of what its
tokens say, weighted by a softmax channel by channel, or the normalised token itself where a stretch
is one position. Two things follow from a latent: the index key, projected, normalised and rotated,
and the entry, which is the latent rotated; both at the first position of the stretch. The key comes
from the latent before its rotation. Source: DeepSeek-V4.1.

Sums of several positions are float32 whatever the compute dtype.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.models.deepseek_v4.attention import WindowAttention
from dhisparse_jax.models.deepseek_v4.compressor import gated_sum
from dhisparse_jax.models.deepseek_v4.indexer import IndexQueries
from dhisparse_jax.models.deepseek_v4.rotary import Rotary, rotary_of
from dhisparse_jax.models.glm.linear import exact_dot, linear, weight_init
from dhisparse_jax.models.glm.norms import RmsNorm


class Latents(nnx.Module):
    """Latents of the stretches of a text.

    Attributes:
        wkv: to values.
        wgate: to gates; None where a stretch is one position.
        rate: positions of a stretch.
    """

    def __init__(self, config: V41Config, rate: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, param_dtype = config.head_dim, jnp.dtype(config.param_dtype)
        init, shape = weight_init(config.hidden_size), (config.hidden_size, width)
        self.wkv = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.wgate = nnx.Param(init(rngs.params(), shape, param_dtype)) if rate > 1 else None
        self.norm = RmsNorm(width, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.rate, self.dtype = rate, dtype

    def raw(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch raw"]:
        """What to keep of a token until its latent is complete: values, then gates."""
        assert self.wgate is not None  # else the latent is complete at once
        kernels = (self.wkv[...], self.wgate[...])
        return jnp.concatenate([exact_dot(x, kernel) for kernel in kernels], axis=-1)

    def summed_positions(self, entry: Int[Array, "*n"]) -> Int[Array, "*n rate"]:
        """Positions of a stretch."""
        inside = jnp.arange(self.rate, dtype=jnp.int32).reshape((1,) * entry.ndim + (-1,))
        return entry[..., None] * self.rate + inside

    def of_stretches(
        self, raw: Float[Array, "*n rate raw"], there: Bool[Array, "*n rate"]
    ) -> Float[Array, "*n width"]:
        """Latents out of what was kept of the positions that `summed_positions` names."""
        values, gates = jnp.split(raw, 2, axis=-1)
        return self.norm(gated_sum(values, gates, there))

    def of_tokens(self, x: Float[Array, "*n hidden"]) -> Float[Array, "*n width"]:
        """Latents where a stretch is one position."""
        return self.norm(jnp.matmul(x.astype(self.dtype), self.wkv[...].astype(self.dtype)))


class EntrySource(nnx.Module):
    """What a layer that makes entries has beside its attention.

    Attributes:
        latents: makes latents.
        wk: from a latent to its index key.
    """

    def __init__(
        self,
        config: V41Config,
        rate: int,
        *,
        rotary: Rotary,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        self.latents = Latents(config, rate, dtype=dtype, rngs=rngs)
        self.wk = linear(
            config.head_dim, config.index_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.k_norm = RmsNorm(
            config.index_dim, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.rotary, self.rate = rotary, rate

    def keys(
        self, latents: Float[Array, "*n width"], entry: Int[Array, "*n"]
    ) -> Float[Array, "*n index"]:
        """Index keys of the entries with these numbers."""
        return self.rotary.rotate_last(self.k_norm(self.wk(latents)), entry * self.rate)

    def entries(
        self, latents: Float[Array, "*n width"], entry: Int[Array, "*n"]
    ) -> Float[Array, "*n width"]:
        """The entries with these numbers."""
        return self.rotary.rotate_last(latents, entry * self.rate)


class V41Attention(WindowAttention):
    """Weights of one layer.

    Attributes:
        source: makes entries and their index keys; None: the layer attends to those of another.
        indexer: chooses among them; None: what another layer has chosen.
        rate: positions per entry; 0: the layer attends to its window alone.
    """

    def __init__(self, config: V41Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        rate = config.rates[layer]
        make = {"rotary": rotary_of(config, entries=rate > 0), "dtype": dtype, "rngs": rngs}
        super().__init__(config, **make)
        makes, selects = layer in config.entry_sources, layer in config.index_sources
        self.source = EntrySource(config, rate, **make) if makes else None
        self.indexer = IndexQueries(config, **make) if selects else None
        self.rate = rate
