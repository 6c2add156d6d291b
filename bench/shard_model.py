"""One GPU's share of GLM-5.x as a served model: real shapes, random weights, replayed choices.

Of G decode GPUs with data-parallel attention and expert parallelism, one runs attention and dense
parts for its own requests, and its experts for tokens of all. Two choices are replayed, since
random weights choose unlike trained ones:

selections  come from calibrated traces (`bench.traces`); the indexer's scores and their top-K are
            computed, and not used.
experts     Every token of this GPU has its `experts_per_token` picks, drawn uniformly from the
            experts on this GPU; they stand for as many picks that the tokens of all GPUs send here.
            So the load of an expert is binomial with the mean that G times as many tokens over G
            times as many experts have. The router runs, and its weights are used.

What goes between GPUs (the all-to-all of the experts) is left out. A runtime flag says whether
choices are replayed, so nothing that is computed can be left out by a compiler.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from bench.shard_experts import route, run_experts, uniform_picks
from bench.shard_products import (
    gated,
    per_head,
    rms_norm,
    sums_of_each,
    times,
    wide_product,
)
from bench.shard_replay import Replay, ShardParams, replayed, with_text
from bench.shard_weights import Indexer, Layer, Mlp, Moe
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.model import AttendFn, Beside, Opened, OpenFn, Ran
from dhisparse_jax.models.glm.decode import geometry_of
from dhisparse_jax.models.glm.norms import along_last, normalised
from dhisparse_jax.models.glm.rope import rotate, rotate_first
from dhisparse_jax.models.history import in_basis
from dhisparse_jax.models.share import Rounded, rounded


@dataclasses.dataclass(frozen=True)
class ShardModel:
    """A share of a GLM model; see `dhisparse_jax.model.ServedModel`.

    Attributes:
        config: sizes of the whole model, or of what one of several chips has of it
            (`bench.shard_glm.split`).
        experts: routed experts per layer on this GPU.
        dtype: of the computation.
    """

    config: GlmConfig
    experts: int
    dtype: str = "bfloat16"

    @property
    def geometry(self) -> Geometry:
        """That of the whole model: attention is data-parallel."""
        return geometry_of(self.config, self.dtype)

    @property
    def context(self) -> int:
        """Most positions the model can use."""
        return self.config.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    def embed(self, params: ShardParams, tokens: Int[Array, "R T"]) -> Float[Array, "R T D"]:
        """Token embeddings."""
        return params.weights.embedding[tokens].astype(self.dtype)

    def logits(self, params: ShardParams, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Final norm and head; the replayed token is by far the best."""
        x = rms_norm(x, params.weights.norm, self.config.norm_eps)
        logits = jnp.matmul(x, params.weights.head, preferred_element_type=jnp.float32)
        return with_text(params.replay, logits)

    def run_group(
        self,
        params: ShardParams,
        pool: int,
        x: Float[Array, "R T D"],
        positions: Int[Array, "R T"],
        open_group: OpenFn[Opened],
        attend: AttendFn[Opened],
        taps: tuple[int, ...] = (),
        beside: Beside | None = None,
    ) -> Ran[Opened]:
        """All layers of one selection group; the first one has the indexer."""
        config, replay = self.config, params.replay
        opened: Any = None
        tapped = []
        for place, number in enumerate(config.groups[pool]):
            layer = params.weights.layers[number]
            normed = rms_norm(x, layer.norms[0], config.norm_eps)
            with jax.named_scope("project"):
                small = rounded(normed)
                query, row, q_lora = project(config, layer, small, positions, self.dtype)
            if place == 0:
                with jax.named_scope("indexer"):
                    index = index_inputs(config, layer.indexer, (normed, small), q_lora, positions)
                    index = in_basis(index, self.geometry)
                    index = dataclasses.replace(index, replayed=replayed(replay, pool, positions))
                opened = open_group(index)
            attended, opened = attend(opened, place, row, query)
            with jax.named_scope("combine"):
                x = x + combine(layer, attended.values)
            normed = rms_norm(x, layer.norms[1], config.norm_eps)
            x = x + self._mlp(layer.mlp, normed, positions, number, replay)
            if place in taps:
                tapped.append(x)
        return Ran(x, tuple(tapped), opened)

    def _mlp(
        self,
        mlp: Mlp | Moe,
        x: Float[Array, "R T D"],
        positions: Int[Array, "R T"],
        layer: int,
        replay: Replay,
    ) -> Float[Array, "R T D"]:
        if isinstance(mlp, Mlp):
            with jax.named_scope("dense"):
                return gated(mlp, rounded(x), self.dtype)
        with jax.named_scope("shared"):
            small = rounded(x)
            shared = gated(mlp.shared, small, self.dtype)
        with jax.named_scope("router"):
            expert, weight = route(self.config, mlp, x)
            drawn = uniform_picks(positions, layer, expert.shape[-1], self.experts)
            expert = jnp.where(replay.on, drawn, expert % self.experts)
        with jax.named_scope("experts"):
            flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
            rows = jax.tree.map(flat, small)
            run = lambda rows, _: gated(mlp.experts, rows, self.dtype, sums_of_each)
            routed = run_experts(run, self.experts, rows, flat(expert), flat(weight))
        return shared + routed.reshape(x.shape)


def project(
    config: GlmConfig,
    layer: Layer,
    x: Rounded,
    positions: Int[Array, "R T"],
    dtype: DTypeLike,
) -> tuple[Float[Array, "R T H row"], Float[Array, "R T row"], Rounded]:
    """Absorbed queries, the row to keep, and the query latent."""
    eps, latent, rank = config.latent_norm_eps, config.kv_lora_rank, config.q_lora_rank
    both = times(x, layer.latents, dtype)
    q_lora = rounded(rms_norm(both[..., :rank], layer.query_norm, eps))
    turn = lambda part, at: rotate(part, at, theta=config.rope_theta, yarn=config.yarn)
    rope = turn(both[..., rank + latent :], positions)
    row = jnp.concatenate(
        (rms_norm(both[..., rank : rank + latent], layer.row_norm, eps), rope), axis=-1
    )
    heads = times(q_lora, layer.queries, dtype).reshape(*positions.shape, config.num_heads, -1)
    absorbed = per_head(heads[..., : config.qk_nope_dim], layer.to_latent)
    turned = turn(heads[..., config.qk_nope_dim :], positions[..., None])
    return jnp.concatenate((absorbed, turned), axis=-1), row, q_lora


def combine(layer: Layer, attended: Float[Array, "R T H latent"]) -> Float[Array, "R T D"]:
    """Residual update from the attended latents."""
    values = per_head(attended, layer.from_latent)
    small = rounded(values.reshape(*values.shape[:2], -1))
    return times(small, layer.out, values.dtype)


def index_inputs(
    config: GlmConfig,
    indexer: Indexer | None,
    both: tuple[Float[Array, "R T D"], Rounded],
    q_lora: Rounded,
    positions: Int[Array, "R T"],
) -> IndexInputs:
    """What the indexer says of the new tokens, from normalised inputs as they are and rounded."""
    x, small = both
    assert indexer is not None  # every group starts with a layer that has one
    turn = lambda part, at: rotate_first(
        part,
        at,
        config.qk_rope_dim,
        theta=config.rope_theta,
        style=config.index_rope_style,
        yarn=config.yarn,
    )
    heads = times(q_lora, indexer.queries, x.dtype)
    heads = heads.reshape(*positions.shape, config.index_heads, -1)
    key = times(small, indexer.keys, x.dtype).astype(jnp.float32)
    key = key - key.mean(axis=-1, keepdims=True)
    weight, bias = indexer.key_norm.astype(jnp.float32)
    key = normalised(key, config.index_norm_eps) * along_last(weight, 3)
    key = (key + along_last(bias, 3)).astype(x.dtype)
    factor = (config.index_heads * config.index_dim) ** -0.5
    weights = wide_product(x, indexer.heads) * factor
    return IndexInputs(
        queries=turn(heads, positions[..., None]), weights=weights, keys=turn(key, positions)
    )
