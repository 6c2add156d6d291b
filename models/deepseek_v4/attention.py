"""Attention of one layer: projections before and after it, and what it keeps of every token.

One row per token is key and value of all heads, so what is attended has rotated channels too, and
they are rotated back at the query's position. Source: the DeepSeek-V4 report, section 2.3.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v4 import SELECTED, V4Config
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.models.deepseek_v4.compressor import Compressor
from dhisparse_jax.models.deepseek_v4.indexer import Indexer
from dhisparse_jax.models.deepseek_v4.rotary import Rotary, rotary_of
from dhisparse_jax.models.glm.linear import linear, residual_init, weight_init
from dhisparse_jax.models.glm.norms import RmsNorm, normalised


class Projected(NamedTuple):
    """What attention reads of a token.

    Attributes:
        query: of every head, rotated.
        row: key and value of all heads, rotated.
        q_lora: normalised query latent, the input of `Indexer.queries`.
    """

    query: Float[Array, "*batch heads head"]
    row: Float[Array, "*batch head"]
    q_lora: Float[Array, "*batch q_lora"]


class WindowAttention(nnx.Module):
    """What attention of every layer has: its window, and the projections before and after it.

    Attributes:
        sinks: logit of each head that takes weight from the rows.
        out_a: from the heads of each group to its latent.
    """

    normalises_heads = False
    """Whether the query of every head is divided by its root mean square."""

    def __init__(
        self, config: SinceV4, *, rotary: Rotary, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        heads, head, width = config.num_heads, config.head_dim, config.hidden_size
        groups, latent = config.output_groups, config.output_lora_rank
        norm_args = {"epsilon": config.norm_eps, "dtype": dtype, "param_dtype": param_dtype}
        linear_args = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_a = linear(width, config.q_lora_rank, **linear_args)
        self.q_norm = RmsNorm(config.q_lora_rank, **norm_args)
        self.q_b = linear(config.q_lora_rank, heads * head, **linear_args)
        self.kv = linear(width, head, **linear_args)
        self.kv_norm = RmsNorm(head, **norm_args)
        self.sinks = nnx.Param(jnp.zeros((heads,), jnp.float32))
        init, per_group = weight_init(heads // groups * head), heads // groups * head
        self.out_a = nnx.Param(init(rngs.params(), (groups, latent, per_group), param_dtype))
        down_init = residual_init(groups * latent, config.num_layers)
        self.out_b = linear(groups * latent, width, kernel_init=down_init, **linear_args)
        self.rotary, self.heads, self.groups = rotary, heads, groups
        self.epsilon, self.dtype = config.norm_eps, dtype

    def project(
        self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> Projected:
        """Queries and row of normalised inputs `x`."""
        q_lora = self.q_norm(self.q_a(x))
        query = self.q_b(q_lora).reshape(*x.shape[:-1], self.heads, -1)
        if self.normalises_heads:
            query = normalised(query.astype(jnp.float32), self.epsilon).astype(self.dtype)
        query = self.rotary.rotate_last(query, positions[..., None])
        return Projected(query, self.row(x, positions), q_lora)

    def row(
        self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch head"]:
        """Key and value of all heads, rotated."""
        return self.rotary.rotate_last(self.kv_norm(self.kv(x)), positions)

    def output(
        self, values: Float[Array, "*batch heads head"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch width"]:
        """Residual update from the attended values of every head."""
        turned = self.rotary.rotate_last(values.astype(self.dtype), -positions[..., None])
        grouped = turned.reshape(*turned.shape[:-2], self.groups, -1)
        latent = jnp.einsum("...gi,goi->...go", grouped, self.out_a[...].astype(self.dtype))
        return self.out_b(latent.reshape(*latent.shape[:-2], -1))


class NormalisedAttention(WindowAttention):
    """That of DeepSeek-V4, whose queries have one length in all heads."""

    normalises_heads = True


class V4Attention(NormalisedAttention):
    """Weights of one layer.

    Attributes:
        compressor: makes the layer's entries; None in a "window" layer.
        indexer: chooses among them; None where all are attended to.
    """

    def __init__(self, config: V4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        rate, kind = config.rate(layer), config.layer_kinds[layer]
        make = {"rotary": rotary_of(config, entries=bool(rate)), "dtype": dtype, "rngs": rngs}
        super().__init__(config, **make)
        self.compressor = (
            Compressor(config, config.head_dim, rate, overlap=kind == SELECTED, **make)
            if rate
            else None
        )
        self.indexer = Indexer(config, **make) if kind == SELECTED else None
