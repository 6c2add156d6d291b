"""One GPU's share of GLM-5.x, as the decode benchmark asks for it."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from bench.shard_model import ShardModel
from bench.shard_protocol import Said
from bench.shard_weights import Weights, abstract_weights, random_weights
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.configs.gpus import H200
from dhisparse_jax.configs.presets import GLM_PRESETS
from dhisparse_jax.configs.workload import PUBLISHED_SURVIVAL, PUBLISHED_TOKENS_PER_STEP
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.block import Vocabulary
from dhisparse_jax.models.draft.checkpoint import abstract_model
from dhisparse_jax.models.draft.drafter import drafter_of
from dhisparse_jax.models.draft.glm_drafts import draft_config
from dhisparse_jax.models.glm.costs import StepLoad, Work, step_work, weight_bytes
from dhisparse_jax.models.glm.planner import expected
from dhisparse_jax.speculation.protocol import NO_DRAFT, Drafter


def glm_shard(name: str, layers: int | None, gpus: int, heads_over: int = 1) -> "GlmShard":
    """The share of one of `gpus`, of the first layers of a preset; None: of all.

    Raises:
        UserError: so many chips do not divide the heads, or what goes with them.
    """
    config = split(cut(GLM_PRESETS[name], layers), heads_over)
    return GlmShard(config=config, experts=max(1, config.num_experts // gpus))


def cut(config: GlmConfig, layers: int | None) -> GlmConfig:
    """The first layers of a model; None: all."""
    count = layers or config.num_layers
    return dataclasses.replace(
        config,
        num_layers=count,
        num_dense_layers=min(config.num_dense_layers, count),
        indexer_types=config.indexer_types[:count],
    )


def split(config: GlmConfig, chips: int) -> GlmConfig:
    """What one of so many chips has of a model whose every request is on all of them.

    Heads, the inner width of dense MLPs, and the vocabulary are divided; rows, keys, the indexer,
    router and shared expert are whole on each. Parts of sums, and the best of each part of the
    vocabulary, would go between the chips.

    Raises:
        UserError: so many chips do not divide one of them.
    """
    sizes = {
        name: getattr(config, name)
        for name in ("num_heads", "dense_intermediate_size", "vocab_size")
    }
    for name, size in sizes.items():
        if size % chips:
            raise UserError(f"{chips} chips do not divide the {size} of {name}; use as many as do")
    return dataclasses.replace(config, **{name: size // chips for name, size in sizes.items()})


class GlmShard(ShardModel):
    """See `shard_protocol.Shard`."""

    survival = PUBLISHED_SURVIVAL
    published_tokens = PUBLISHED_TOKENS_PER_STEP

    @property
    def selections(self) -> tuple[int, ...]:
        """One for each group."""
        return (1,) * len(self.config.groups)

    def abstract_weights(self) -> Weights:
        """Shapes of all weights."""
        return abstract_weights(self.config, self.experts)

    def random_weights(self) -> Weights:
        """Random weights, on the device."""
        return random_weights(self.abstract_weights())

    def kind(self, pool: int) -> Hashable:
        """Which layers of a group are routed."""
        dense = self.config.num_dense_layers
        return tuple(number >= dense for number in self.config.groups[pool])

    def begin_weights(self, weights: Weights) -> Weights:
        """The embedding."""
        nothing: Any = None
        return Weights(embedding=weights.embedding, head=nothing, norm=nothing, layers=())

    def group_weights(self, weights: Weights, pool: int, stands: int) -> Weights:
        """The layers of a group."""
        nothing: Any = None
        first = self.config.groups[stands][0]
        own = tuple(weights.layers[number] for number in self.config.groups[pool])
        layers = (*(nothing for _ in range(first)), *own)
        return Weights(embedding=nothing, head=nothing, norm=nothing, layers=layers)

    def end_weights(self, weights: Weights) -> Weights:
        """Final norm and head."""
        nothing: Any = None
        return dataclasses.replace(weights, layers=(), embedding=nothing)

    def vocabulary_of(self, weights: Weights) -> tuple[Array, Array]:
        """Embedding and head."""
        return weights.embedding, weights.head

    def draft(self, kind: str, weights: Weights) -> tuple[Drafter, Any]:
        """A drafter, and shapes of its weights."""
        if kind == "none":
            return NO_DRAFT.drafter, ()
        config = draft_config(kind, self.config)
        vocabulary = Vocabulary(*self.vocabulary_of(weights))
        return drafter_of(abstract_model(config, jnp.dtype(self.dtype)), config, vocabulary)

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights by stage."""
        return weight_bytes(self.config, self.experts)

    def scores_bytes(self, cfg: HierarchyConfig) -> int:
        """Nothing: they fit into what is set aside."""
        return 0

    def step_work(self, cfg: HierarchyConfig, load: StepLoad, draft_bytes: int) -> dict[str, Work]:
        """See `models.glm.costs`."""
        return step_work(self.config, self.experts, cfg, load, draft_bytes)

    def expected(
        self, cfg: HierarchyConfig, context: int, tokens: float, draft_bytes: int, step: float
    ) -> dict[str, Any]:
        """What `dhisparse plan` says of the cell on an H200, and how much longer it took."""
        found = expected(self.config, self.experts, cfg, context, tokens, draft_bytes, gpu=H200)
        return {
            "step_ms": 1e3 * found.seconds,
            "measured_over_expected": step / found.seconds,
            "fetched_share": found.fetched_share,
            "exposed_ms": 1e3 * found.exposed,
            "stages_ms": {stage: 1e3 * seconds for stage, seconds in found.stages.items()},
        }

    def said(self, gpus: int) -> Said:
        """What every result says of it."""
        config = self.config
        return Said(
            executed=[
                f"{config.num_layers} layers: attention, indexer with top-K, norms, router, shared "
                f"expert, {self.experts} of {config.num_experts} experts, head; weights random, "
                "fp8 with a scale per output channel, inputs rounded to fp8 with a scale per row",
            ],
            modelled=[
                "the profile of acceptance is published for a DSpark of GLM-5.2; the mean "
                f"published beside it is {PUBLISHED_TOKENS_PER_STEP}",
                "sizes of the draft, as far as they are not published (models.draft.glm_drafts)",
            ],
        )
