"""The draft model as Flax NNX modules: weights and per-layer parts, with the published names.

A published matrix `X.weight [out, in]` is `X.kernel [in, out]` here; every other array has its
published name and shape. Which positions a row attends to is decided in `models.draft.block`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.draft.config import DraftConfig
from dhisparse_jax.models.draft.dflash2 import CandidateSelector, DynamicConv, convolve
from dhisparse_jax.models.draft.dspark import ConfidenceHead, MarkovHead
from dhisparse_jax.models.glm.linear import linear, residual_init
from dhisparse_jax.models.glm.norms import RmsNorm
from dhisparse_jax.models.glm.rope import rotate
from pallas_kernels.draft_attention.types import KeysValues


class Context(NamedTuple):
    """Keys, normed and rotated, and values of committed positions, for every layer."""

    keys: Float[Array, "b layers s heads dim"]
    values: Float[Array, "b layers s heads dim"]


Attend = Callable[
    [Float[Array, "b a t heads dim"], KeysValues],
    Float[Array, "b a t heads dim"],
]
"""Attention of the rows of blocks, by their queries, keys and values, in one layer."""


class DraftAttention(nnx.Module):
    """Projections of grouped-query attention with normed queries and keys."""

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, dim = config.hidden_size, config.head_dim
        param_dtype = jnp.dtype(config.param_dtype)
        args = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        norm_args = {"epsilon": config.norm_eps, "dtype": dtype, "param_dtype": param_dtype}
        inner = config.num_heads * dim
        self.q_proj = linear(width, inner, **args)
        self.k_proj = linear(width, config.num_kv_heads * dim, **args)
        self.v_proj = linear(width, config.num_kv_heads * dim, **args)
        out_init = residual_init(inner, config.num_layers)
        self.o_proj = linear(inner, width, kernel_init=out_init, **args)
        self.q_norm = RmsNorm(dim, **norm_args)
        self.k_norm = RmsNorm(dim, **norm_args)
        self.dim = dim
        self.theta = config.rope_theta

    def queries(
        self, x: Float[Array, "*batch d"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch heads dim"]:
        """Normed and rotated queries."""
        return self._turned(self.q_norm(self._split(self.q_proj(x))), positions)

    def keys_values(
        self, x: Float[Array, "*batch d"], positions: Int[Array, "*batch"]
    ) -> KeysValues:
        """Normed and rotated keys, and values."""
        keys = self._turned(self.k_norm(self._split(self.k_proj(x))), positions)
        return KeysValues(keys, self._split(self.v_proj(x)))

    def output(self, heads: Float[Array, "*batch heads dim"]) -> Float[Array, "*batch d"]:
        """Residual update from the attended values of each head."""
        return self.o_proj(heads.reshape(*heads.shape[:-2], -1))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.dim)

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rotate(x, positions[..., None], theta=self.theta, style="half-split")


class DraftMlp(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        args = {"dtype": dtype, "param_dtype": jnp.dtype(config.param_dtype), "rngs": rngs}
        self.gate_proj = linear(width, inner, **args)
        self.up_proj = linear(width, inner, **args)
        down_init = residual_init(inner, config.num_layers)
        self.down_proj = linear(inner, width, kernel_init=down_init, **args)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Residual update for normalised inputs `x`."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nnx.Module):
    """One layer over block rows: `h += attention(norm(h))`, then `h += mlp(norm(h))`.

    Attributes:
        attention_conv: DFlash2's convolutions around the attention, else None.
        mlp_conv: DFlash2's convolutions around the MLP, else None.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_layernorm = _norm(config, dtype)
        self.self_attn = DraftAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = _norm(config, dtype)
        self.mlp = DraftMlp(config, dtype=dtype, rngs=rngs)
        convolved = config.selector is not None
        self.attention_conv = DynamicConv(config, dtype=dtype, rngs=rngs) if convolved else None
        self.mlp_conv = DynamicConv(config, dtype=dtype, rngs=rngs) if convolved else None

    def __call__(
        self,
        x: Float[Array, "b a t d"],
        positions: Int[Array, "b a t"],
        attend: Attend,
    ) -> Float[Array, "b a t d"]:
        """The rows after this layer."""

        def attention(y: jax.Array) -> jax.Array:
            queries = self.self_attn.queries(y, positions)
            own = self.self_attn.keys_values(y, positions)
            return self.self_attn.output(attend(queries, own))

        x = x + _around(self.attention_conv, self.input_layernorm(x), attention)
        return x + _around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _around(
    conv: DynamicConv | None, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """A sublayer, between its convolutions if it has them."""
    if conv is None:
        return sublayer(x)
    before, after = conv.kernels(x)
    return convolve(after, sublayer(convolve(before, x)))


def _norm(config: DraftConfig, dtype: jnp.dtype) -> RmsNorm:
    """A norm over the draft's width."""
    return RmsNorm(
        config.hidden_size,
        epsilon=config.norm_eps,
        dtype=dtype,
        param_dtype=jnp.dtype(config.param_dtype),
    )


class DraftModel(nnx.Module):
    """All weights of a draft, kept as `nnx.Param`; embedding and head are the target's.

    Args:
        config: Sizes. `config.param_dtype` is the dtype of the weights.
        rngs: Source of the initial values.
        dtype: Compute dtype. Norms, softmax, logits and scores are float32 whatever it is.
    """

    def __init__(
        self, config: DraftConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32
    ) -> None:
        dtype = jnp.dtype(dtype)
        self.fc = linear(
            len(config.taps) * config.target_hidden_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        self.hidden_norm = _norm(config, dtype)
        self.layers = nnx.List(
            DraftLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)
        )
        self.norm = _norm(config, dtype)
        args = {"dtype": dtype, "rngs": rngs}
        self.candidate_selector = CandidateSelector(config, **args) if config.selector else None
        heads = {"dtype": dtype, "param_dtype": jnp.dtype(config.param_dtype), "rngs": rngs}
        dspark, width = config.markov, config.hidden_size
        self.markov_head = MarkovHead(dspark, config.vocab_size, width, **heads) if dspark else None
        confident = dspark if dspark and dspark.confidence else None
        self.confidence_head = ConfidenceHead(confident, width, **heads) if confident else None
        self.dtype = dtype

    def context(self, features: Float[Array, "b s taps"], positions: Int[Array, "b s"]) -> Context:
        """Keys and values of committed tokens from the target's hidden states.

        The fused features do not pass a layer's input norm: it is for block rows alone.
        """
        fused = self.hidden_norm(self.fc(features.astype(self.dtype)))
        parts = [layer.self_attn.keys_values(fused, positions) for layer in self.layers]
        keys, values = zip(*parts, strict=True)
        return Context(jnp.stack(keys, axis=1), jnp.stack(values, axis=1))

    def hidden(
        self,
        rows: Float[Array, "b a t d"],
        positions: Int[Array, "b a t"],
        attends: Sequence[Attend],
    ) -> Float[Array, "b a t d"]:
        """Block rows after the last norm.

        Args:
            rows: embeddings of the anchor and the masks.
            positions: absolute positions of the rows.
            attends: attention of each layer, over committed positions and the block.
        """
        h = rows.astype(self.dtype)
        for layer, attend in zip(self.layers, attends, strict=True):
            h = layer(h, positions, attend)
        return self.norm(h)
