"""One GPU's share of DeepSeek-V4.1 as a served model: the library's own layers over its share.

The layers are `models.deepseek_v41`'s, with matrices that stay fp8 and packed experts
(`models.share`); choices are replayed as `bench.shard_model` says. Every layer that selects follows
traces of its own, in records of its pool. Tables of n-grams are spread over the GPUs as experts
are: an n-th of their rows is here, which all look-ups of this GPU's tokens hit; they stand for as
many of the tokens of all. History is fp8, 584 B a row and 132 B a key: no kernel takes the 4-bit
formats, 288 and 68 B, that the model has too.
"""

import dataclasses
from collections.abc import Hashable
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bench.shard_experts import run_experts, uniform_picks
from bench.shard_protocol import Said
from bench.shard_replay import ShardParams, first_selections, replayed, with_text
from bench.shard_v41_sizes import V41_SIZES, cut_drafter, cut_model
from bench.shard_weights import random_like
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.workload import ATTACHED_SURVIVAL, ATTACHED_TOKENS_PER_STEP
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.model import AttendFn, Beside, Opened, OpenFn, Ran
from dhisparse_jax.models.attached.drafter import AttachedDrafter
from dhisparse_jax.models.attached.load import make_attached
from dhisparse_jax.models.deepseek_v4.moe import bounded_swiglu
from dhisparse_jax.models.deepseek_v41.costs import F32, Drafted, step_work, weighed
from dhisparse_jax.models.deepseek_v41.decode import V41Served
from dhisparse_jax.models.draft.drafter import DrafterParams
from dhisparse_jax.models.experts import Routing
from dhisparse_jax.models.glm.costs import StepLoad, Work
from dhisparse_jax.models.params import new_model
from dhisparse_jax.models.share import Named, Share, Stored, cut
from dhisparse_jax.models.stored_experts import StoredMatrices
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.speculation.protocol import NO_DRAFT, Drafter
from pallas_kernels.packed_products.api import packed_products
from pallas_kernels.packed_products.reference import halved

OUTSIDE = ""
"""The module of weights that no layer has."""


@pytree
class V41Weights:
    """Weights by what reads them.

    Attributes:
        begin: the embedding.
        groups: of the layers of each group.
        end: final norm and head.
    """

    begin: Named
    groups: tuple[Named, ...]
    end: Named


def v41_shard(name: str, layers: int | None, gpus: int) -> "V41Shard":
    """The share of one of `gpus`, of the first layers of a model; None: of all."""
    sizes = V41_SIZES[name]
    config = cut_model(sizes.model, layers, gpus)
    return V41Shard(config, cut_drafter(sizes.drafter, config), gpus)


@dataclasses.dataclass(frozen=True)
class V41Shard:
    """See `shard_protocol.Shard`.

    Attributes:
        config: sizes, with the rows of tables that are here.
        drafter: sizes of the DSpark that the model has attached.
        gpus: that share experts and tables.
        dtype: of the computation.
    """

    config: V41Config
    drafter: AttachedConfig
    gpus: int
    dtype: str = "bfloat16"

    survival = ATTACHED_SURVIVAL
    published_tokens = ATTACHED_TOKENS_PER_STEP

    @property
    def experts(self) -> int:
        """Routed experts per layer on this GPU."""
        return max(1, self.config.num_experts // self.gpus)

    @cached_property
    def share(self) -> Share:
        """The model, cut."""
        make = lambda: new_model(self.config, jnp.dtype(self.dtype))
        return cut(make, kept=("head",), held=self.experts, run=run_share)

    @cached_property
    def draft_share(self) -> Share:
        """Its drafter, cut likewise."""
        held = max(1, self.drafter.num_experts // self.gpus)
        make = lambda: make_attached(self.drafter, self.config, jnp.dtype(self.dtype))
        return cut(make, kept=("proj", "markov_w2"), held=held, run=run_share)

    @property
    def served(self) -> V41Served:
        """The library's model."""
        return V41Served(config=self.config, graph=self.share.graph, dtype=self.dtype)

    @property
    def geometry(self) -> Geometry:
        """See `V41Served`; attention is data-parallel."""
        return self.served.geometry

    @property
    def context(self) -> int:
        """Most positions the model can use."""
        return self.config.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def selections(self) -> tuple[int, ...]:
        """How many layers of each group select."""
        selects = set(self.config.index_sources)
        return tuple(len(selects & set(group)) for group in self.config.groups)

    def embed(self, params: ShardParams, tokens: Int[Array, "R T"]) -> Float[Array, "R T D"]:
        """See `V41Served`."""
        return self.served.embed(self.share.state(params.weights.begin), tokens)

    def logits(self, params: ShardParams, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """See `V41Served`; the replayed token is by far the best."""
        logits = self.served.logits(self.share.state(params.weights.end), x)
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
        """See `V41Served`; selections are replayed."""
        numbers = iter(range(first_selections(self.selections)[pool], sum(self.selections)))

        def open_it(index: IndexInputs, opened: Opened | None = None) -> Opened:
            chosen = replayed(params.replay, next(numbers), positions)
            return open_group(dataclasses.replace(index, replayed=chosen), opened)

        state = self.share.state(params.weights.groups[pool])
        return self.served.run_group(state, pool, x, positions, open_it, attend, taps, beside)

    def abstract_weights(self) -> V41Weights:
        """Shapes of all weights."""
        return self._sorted(self.share.shapes)

    def random_weights(self) -> V41Weights:
        """Random weights, on the device: a program for each kind of module."""
        shapes = enumerate(self.share.shapes.items())
        return self._sorted(
            {module: random_like(leaves, seed, fan_axis=-2) for seed, (module, leaves) in shapes}
        )

    def _sorted(self, every: Named) -> V41Weights:
        """Weights by what reads them."""
        outside = every[OUTSIDE]
        words = {name: leaf for name, leaf in outside.items() if name == "word_of"}
        of = lambda number: {
            name: own for name, own in every.items() if name.startswith(f"layers.{number}.")
        }
        groups: list[Named] = []
        for group in self.config.groups:
            known = set(group) & set(self.config.engram_layers)
            found = {name: own for number in group for name, own in of(number).items()}
            groups.append(found | ({OUTSIDE: words} if known else {}))
        return V41Weights(
            begin={OUTSIDE: {"embedding": outside["embedding"]}},
            groups=tuple(groups),
            end={name: every[name] for name in ("norm", "head")},
        )

    def kind(self, pool: int) -> Hashable:
        """No two groups are alike: rates, tables, selections."""
        return pool

    def begin_weights(self, weights: V41Weights) -> V41Weights:
        """The embedding."""
        return dataclasses.replace(weights, groups=(), end={})

    def group_weights(self, weights: V41Weights, pool: int, stands: int) -> V41Weights:
        """The layers of a group."""
        groups = (*({} for _ in range(stands)), weights.groups[pool])
        return V41Weights(begin={}, groups=groups, end={})

    def end_weights(self, weights: V41Weights) -> V41Weights:
        """Final norm and head."""
        return dataclasses.replace(weights, begin={}, groups=())

    def vocabulary_of(self, weights: V41Weights) -> tuple[Array, Array]:
        """Embedding and head."""
        return weights.begin[OUTSIDE]["embedding"], weights.end["head"]["kernel"]

    def draft(self, kind: str, weights: V41Weights) -> tuple[Drafter, Any]:
        """The attached DSpark, and shapes of its weights."""
        if kind == "none":
            return NO_DRAFT.drafter, ()
        if kind != "dspark":
            raise UserError(f"the draft of this model is dspark, not {kind!r}")
        share, config = self.draft_share, self.drafter
        drafter = AttachedDrafter(config, self.config, share.graph, self.dtype, config.block_size)
        embedding, head = self.vocabulary_of(weights)
        draft = share.state(share.shapes)
        return drafter, DrafterParams(draft=draft, embedding=embedding, head=head)

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights by stage."""
        return {stage: each.bytes for stage, each in weighed(self.share.shapes).items()}

    def scores_bytes(self, cfg: HierarchyConfig) -> int:
        """Those of the pool with most records."""
        records = max(cfg.records(pool) for pool in range(cfg.pools))
        return F32 * cfg.requests * cfg.queries * records

    def step_work(self, cfg: HierarchyConfig, load: StepLoad, draft_bytes: int) -> dict[str, Work]:
        """See `models.deepseek_v41.costs`."""
        draft = Drafted(self.drafter, self.draft_share.shapes) if draft_bytes else None
        return step_work(self.config, self.share.shapes, cfg, load, draft)

    def expected(
        self, cfg: HierarchyConfig, context: int, tokens: float, draft_bytes: int, step: float
    ) -> dict[str, Any]:
        """Nothing: no speeds of this model's stages are known yet."""
        return {}

    def said(self, gpus: int) -> Said:
        """What every result says of it."""
        config, row = self.config, self.geometry.row.words * 4
        return Said(
            executed=[
                f"{config.num_layers} layers of models.deepseek_v41: attention over windows and "
                f"entries with sinks, {len(config.index_sources)} index sources with top-K and "
                "candidate blocks, mHC, n-grams, router, shared expert, "
                f"{self.experts} of {config.num_experts} experts, head; weights random, matrices "
                "fp8 with a scale per output channel and rows rounded to fp8, experts packed 4-bit "
                "with e8m0 scales for each 32 inputs and bfloat16 rows",
                f"rows of {row} B and index keys of {self.geometry.key_bytes} B: the 4-bit formats "
                "of the model have no kernel",
                f"tables of n-grams: 1 / {gpus} of their rows, looked up for this GPU's tokens",
                "the attached DSpark with its share of experts",
            ],
            modelled=[
                "layers that select from one pool follow traces of their own, over one order of "
                "last selections when they start; candidate blocks are computed and not followed",
                "the profile of acceptance has the middle of the mean accept lengths published for "
                f"DeepSeek-V4-Flash, 3.2 to 3.6 ({ATTACHED_TOKENS_PER_STEP}); none is published "
                "for V4.1, and none by position",
            ],
        )


def run_share(
    stored: Stored, x: Float[Array, "R T D"], routing: Routing, limit: float, layer: int
) -> Float[Array, "R T D"]:
    """The experts that are here, on picks that stand for those of all GPUs' tokens.

    A pick is drawn from what the router chose, so that none of it can be left out.
    """
    count, picks = stored.down.numbers.shape[0], routing.experts.shape[-1]
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    drawn = uniform_picks(routing.experts[..., 0] * x.shape[1] + place, layer, picks, count)
    flat = lambda leaf: leaf.reshape(-1, leaf.shape[-1])
    run = partial(_expert_blocks, stored, limit)
    rows = halved(flat(x))
    return run_experts(run, count, rows, flat(drawn), flat(routing.weights)).reshape(x.shape)


def _expert_blocks(
    stored: Stored, limit: float, rows: Float[Array, "e m D"], counts: Int[Array, " e"]
) -> Float[Array, "e m D"]:
    """A block of halved rows of every expert, through it."""

    def times(x: Float[Array, "e m in"], matrix: StoredMatrices) -> Float[Array, "e m out"]:
        return packed_products(x, matrix.numbers[...], matrix.scales[...], counts)

    gate, up = times(rows, stored.gate), times(rows, stored.up)
    return times(halved(bounded_swiglu(gate, up, limit).astype(rows.dtype)), stored.down)
