"""Multi-head latent attention: projections before and after the attention itself.

Which rows a query attends to, and where they are stored, is decided elsewhere. Two equal forms are
offered. In the absorbed form one stored row serves all heads (decoding, sparse attention); in the
expanded form every head has keys and values of its own (dense attention over a whole sequence).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.linear import linear, residual_init, weight_init
from dhisparse_jax.models.glm.norms import RmsNorm
from dhisparse_jax.models.glm.rope import rotate


class Projected(NamedTuple):
    """Absorbed form of the attention inputs.

    With r the latent width, head h attends to the stored rows s with weights
    `softmax_s((q_latent[h] . row[s, :r] + q_rope[h] . row[s, r:]) * scale)`; its context is the
    weighted sum of `row[s, :r]`.

    Attributes:
        q_latent: Queries against the latent part of a row.
        q_rope: Queries against the rotated part of a row.
        row: What to store for this token: latent after its norm, then the rotated key.
        q_lora: Normalised query latent, the input of `Indexer.queries`.
    """

    q_latent: Float[Array, "*batch heads latent"]
    q_rope: Float[Array, "*batch heads rope"]
    row: Float[Array, "*batch row"]
    q_lora: Float[Array, "*batch q_lora"]


class Expanded(NamedTuple):
    """Per-head form of the attention inputs; `q` and `k` hold nope channels, then rotated ones."""

    q: Float[Array, "*batch heads qk"]
    k: Float[Array, "*batch heads qk"]
    v: Float[Array, "*batch heads v"]
    q_lora: Float[Array, "*batch q_lora"]


class MlaAttention(nnx.Module):
    """Projections of one attention layer.

    Attributes:
        scale: Factor on the query-key products.
        w_uk: Latent to nope key channels of each head.
        w_uv: Latent to value channels of each head.
    """

    def __init__(self, config: GlmConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        width, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
        norm_args = {"epsilon": config.latent_norm_eps, "dtype": dtype, "param_dtype": param_dtype}
        linear_args = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_a = linear(width, config.q_lora_rank, **linear_args)
        self.q_norm = RmsNorm(config.q_lora_rank, **norm_args)
        self.q_b = linear(config.q_lora_rank, heads * config.qk_dim, **linear_args)
        self.kv_a = linear(width, config.row_dim, **linear_args)
        self.kv_norm = RmsNorm(latent, **norm_args)
        init = weight_init(latent)
        self.w_uk = nnx.Param(init(rngs.params(), (heads, config.qk_nope_dim, latent), param_dtype))
        self.w_uv = nnx.Param(init(rngs.params(), (heads, config.v_dim, latent), param_dtype))
        self.out = linear(
            heads * config.v_dim,
            width,
            kernel_init=residual_init(heads * config.v_dim, config.num_layers),
            **linear_args,
        )
        self.num_heads = heads
        self.latent = latent
        self.nope = config.qk_nope_dim
        self.theta = config.rope_theta
        self.yarn = config.yarn
        self.scale = config.attention_scale
        self.dtype = dtype

    def project(
        self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> Projected:
        """Absorbed queries and the row to store, for normalised inputs `x`."""
        q_nope, q_rope, q_lora = self._queries(x, positions)
        w_uk = self.w_uk[...].astype(self.dtype)
        q_latent = jnp.einsum("...hn,hnr->...hr", q_nope, w_uk)
        return Projected(q_latent, q_rope, self._row(x, positions), q_lora)

    def expand(self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]) -> Expanded:
        """Queries, keys and values of every head, for normalised inputs `x`."""
        q_nope, q_rope, q_lora = self._queries(x, positions)
        row = self._row(x, positions)
        latent, k_rope = row[..., : self.latent], row[..., self.latent :]
        k_nope = jnp.einsum("...r,hnr->...hn", latent, self.w_uk[...].astype(self.dtype))
        v = jnp.einsum("...r,hvr->...hv", latent, self.w_uv[...].astype(self.dtype))
        k_rope = jnp.broadcast_to(k_rope[..., None, :], q_rope.shape)
        q = jnp.concatenate((q_nope, q_rope), axis=-1)
        return Expanded(q, jnp.concatenate((k_nope, k_rope), axis=-1), v, q_lora)

    def combine(self, context: Float[Array, "*batch heads latent"]) -> Float[Array, "*batch width"]:
        """Residual update from the attention-weighted latents of each head (absorbed form)."""
        w_uv = self.w_uv[...].astype(self.dtype)
        return self.output(jnp.einsum("...hr,hvr->...hv", context.astype(self.dtype), w_uv))

    def output(self, heads: Float[Array, "*batch heads v"]) -> Float[Array, "*batch width"]:
        """Residual update from the attention-weighted values of each head (expanded form)."""
        return self.out(heads.reshape(*heads.shape[:-2], -1))

    def _queries(
        self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Nope and rotated query channels per head, and the query latent."""
        q_lora = self.q_norm(self.q_a(x))
        q = self.q_b(q_lora).reshape(*x.shape[:-1], self.num_heads, -1)
        q_rope = rotate(q[..., self.nope :], positions[..., None], theta=self.theta, yarn=self.yarn)
        return q[..., : self.nope], q_rope, q_lora

    def _row(
        self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch row"]:
        """The stored row: normalised latent, then rotated key; interleaved pairs stay in place."""
        kv = self.kv_a(x)
        k_rope = rotate(kv[..., self.latent :], positions, theta=self.theta, yarn=self.yarn)
        return jnp.concatenate((self.kv_norm(kv[..., : self.latent]), k_rope), axis=-1)
