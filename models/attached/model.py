"""The drafter as Flax NNX modules: three layers of the target's kind, and DSpark's heads.

What it reads of the target becomes, projected and normalised, the input of every stage's keys. The
rows of a block attend to those of the newest positions, as many as fit into a window, and to each
other in both directions; all rows see the same positions. Sources: DeepSeek-V4-Flash-DSpark and
V4.1-Flash; DSpark (2026), section 2.4.3 of the V4.1 report.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.attached import AttachedConfig, stage_sizes
from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.models.deepseek_v4.attention import (
    NormalisedAttention,
    Projected,
    WindowAttention,
)
from dhisparse_jax.models.deepseek_v4.hyper import (
    HyperConnection,
    HyperHead,
    Streams,
    collapsed,
    connected,
)
from dhisparse_jax.models.deepseek_v4.moe import V4Moe
from dhisparse_jax.models.deepseek_v4.rotary import rotary_of
from dhisparse_jax.models.draft.config import MarkovConfig
from dhisparse_jax.models.draft.dspark import ConfidenceHead, MarkovHead
from dhisparse_jax.models.glm.linear import linear
from dhisparse_jax.models.glm.norms import RmsNorm

AttendStage = Callable[[int, Projected], Float[Array, "R B heads head"]]
"""(number of the stage, what its rows project to) -> what each of their heads attended to."""


class Stage(nnx.Module):
    """One layer: a window alone and experts, each connected to all streams."""

    def __init__(
        self, sizes: SinceV4, attention: type[WindowAttention], *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        args = {"dtype": dtype, "rngs": rngs}
        self.attention_hyper = HyperConnection(sizes, rngs=rngs)
        self.attention_norm = _norm(sizes, dtype)
        self.attention = attention(sizes, rotary=rotary_of(sizes, entries=False), **args)
        self.mlp_hyper = HyperConnection(sizes, rngs=rngs)
        self.mlp_norm = _norm(sizes, dtype)
        self.mlp = V4Moe(sizes, **args)


class Block(NamedTuple):
    """The rows of a block after the last stage.

    Attributes:
        hidden: float32 sum of their streams, before the norm: what the confidence is read from.
        normed: after it: what the target's head reads.
    """

    hidden: Float[Array, "R B width"]
    normed: Float[Array, "R B width"]


class AttachedModel(nnx.Module):
    """All weights of a drafter, kept as `nnx.Param`; embedding and head are the target's.

    Args:
        config: Sizes.
        target: Sizes of the target.
        rngs: Source of the initial values.
        dtype: Compute dtype. What is float32 in the target is so here; so is the confidence.

    Attributes:
        hyper_head: Sum of the streams after the last stage; None where the connection of the last
            sublayer has its weights (DeepSeek-V4.1).
    """

    def __init__(
        self,
        config: AttachedConfig,
        target: SinceV4,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        dtype, param_dtype = jnp.dtype(dtype), jnp.dtype(target.param_dtype)
        sizes, width = stage_sizes(config, target), target.hidden_size
        own_sites = isinstance(target, V4Config)
        args = {"param_dtype": param_dtype, "rngs": rngs}
        self.main_proj = linear(len(config.taps) * width, width, dtype=dtype, **args)
        self.main_norm = _norm(target, dtype)
        attention = NormalisedAttention if own_sites else WindowAttention
        self.stages = nnx.List(
            Stage(sizes, attention, dtype=dtype, rngs=rngs) for _ in range(config.stages)
        )
        self.hyper_head = HyperHead(target, rngs=rngs) if own_sites else None
        self.norm = _norm(target, dtype)
        markov = MarkovConfig(rank=config.markov_rank)
        self.markov_head = MarkovHead(markov, target.vocab_size, width, dtype=dtype, **args)
        exact = jnp.dtype(jnp.float32)
        self.confidence_head = ConfidenceHead(markov, width, dtype=exact, bias=False, **args)
        self.streams, self.dtype = target.streams, dtype

    def rows(
        self, features: Float[Array, "R X taps"], positions: Int[Array, "R X"]
    ) -> Float[Array, "R stages X head"]:
        """Keys, which are values, of positions of the target, for every stage."""
        read = self.main_norm(self.main_proj(features.astype(self.dtype)))
        rows = [stage.attention.row(read, positions) for stage in self.stages]
        return jnp.stack(rows, axis=1)

    def block(
        self,
        embedded: Float[Array, "R B width"],
        positions: Int[Array, "R B"],
        tokens: Int[Array, "R B"],
        attend: AttendStage,
    ) -> Block:
        """A block of rows through all stages.

        Args:
            embedded: embeddings of the last token and of the noise.
            positions: int32 absolute positions of the rows.
            tokens: int32 ids of the rows.
            attend: attention of the rows of a stage.
        """
        streams = jnp.repeat(embedded.astype(self.dtype)[..., None, :], self.streams, axis=-2)
        first = (jnp.arange(self.streams) == 0).astype(jnp.float32)
        pre = jnp.broadcast_to(first.reshape(1, 1, -1), streams.shape[:-1])
        for number, stage in enumerate(self.stages):

            def attention(x: Float[Array, "R B width"], number: int = number) -> Array:
                layer = self.stages[number].attention
                attended = attend(number, layer.project(x, positions))
                return layer.output(attended, positions)

            streams, pre = self._sublayer(
                stage.attention_hyper, stage.attention_norm, attention, streams, pre
            )
            experts = lambda x, stage=stage: stage.mlp(x, tokens)
            streams, pre = self._sublayer(stage.mlp_hyper, stage.mlp_norm, experts, streams, pre)
        hidden = collapsed(streams, pre) if self.hyper_head is None else self.hyper_head(streams)
        return Block(hidden, self.norm(hidden))

    def _sublayer(
        self,
        hyper: HyperConnection,
        norm: RmsNorm,
        sublayer: Callable[[Float[Array, "R B width"]], Float[Array, "R B width"]],
        streams: Streams,
        pre: Float[Array, "R B streams"],
    ) -> tuple[Streams, Float[Array, "R B streams"]]:
        """The streams after a sublayer, and the weights that its connection leaves for the next.

        DeepSeek-V4's connections weight their own sublayer's input, V4.1's the next one's.
        """
        mixing = hyper.mixing(streams)
        weights = pre if self.hyper_head is None else mixing.pre
        update = sublayer(norm(collapsed(streams, weights)))
        return connected(streams, update, mixing), mixing.pre


def _norm(sizes: SinceV4, dtype: jnp.dtype) -> RmsNorm:
    """A norm over the width."""
    param_dtype = jnp.dtype(sizes.param_dtype)
    return RmsNorm(sizes.hidden_size, epsilon=sizes.norm_eps, dtype=dtype, param_dtype=param_dtype)
