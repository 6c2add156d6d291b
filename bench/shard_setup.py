"""What the cells of a decode benchmark have in common: the model, the drafts, what is replayed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bench.replayed import ReplayedDraft
from bench.shard_cells import Cell, replaying
from bench.shard_model import Replay, ShardModel, ShardParams
from bench.shard_weights import Weights, abstract_leaf, abstract_weights
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.configs.presets import GLM_PRESETS
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.block import Vocabulary
from dhisparse_jax.models.draft.checkpoint import abstract_model
from dhisparse_jax.models.draft.drafter import drafter_of
from dhisparse_jax.models.draft.glm_drafts import draft_config
from dhisparse_jax.models.glm.decode import geometry_of
from dhisparse_jax.speculation.protocol import NO_DRAFT, Drafter

HOST_PAGE = 16


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
            raise UserError(f"{chips} chips do not divide the {size} of {name}")
    return dataclasses.replace(config, **{name: size // chips for name, size in sizes.items()})


@dataclasses.dataclass(frozen=True)
class Setup:
    """Shapes of everything, for one draft.

    Attributes:
        model: the share.
        drafter: with replayed acceptance.
        params: shapes of weights and replay.
        draft_params: shapes of the draft's.
        capacity: positions per request.
        host_pages: of all cells.
    """

    model: ShardModel
    drafter: Drafter
    params: ShardParams
    draft_params: Any
    capacity: int
    host_pages: int

    def config(self, cell: Cell) -> HierarchyConfig:
        """Sizes of the hierarchy of a cell."""
        return cell.config(
            self.model.geometry, self.capacity, self.drafter.length + 1, self.host_pages
        )


def capacity_of(context: int, room: int) -> int:
    """Positions of a request that starts at `context` and may grow by `room`, in whole pages."""
    return -(-(context + room) // HOST_PAGE) * HOST_PAGE


def host_requests(name: str, layers: int | None, capacity: int, host_bytes: float) -> int:
    """Requests of so many positions whose records and keys fit into so much host memory."""
    probe = HierarchyConfig(
        geometry=geometry_of(cut(GLM_PRESETS[name], layers), ShardModel.dtype),
        policy=Policy.FIXED,
        requests=1,
        capacity=capacity,
        hot_rows=1,
        host_page=HOST_PAGE,
    )
    return int(host_bytes) // (probe.row_pages * probe.host_page_bytes)


def drafter_for(kind: str, target: GlmConfig, weights: Weights, dtype: str) -> tuple[Drafter, Any]:
    """A drafter, and shapes of its weights."""
    if kind == "none":
        return NO_DRAFT.drafter, ()
    config = draft_config(kind, target)
    vocabulary = Vocabulary(weights.embedding, weights.head)
    return drafter_of(abstract_model(config, jnp.dtype(dtype)), config, vocabulary)


def abstract_setup(  # noqa: PLR0913  # what a command asks for
    name: str,
    *,
    layers: int | None,
    context: int,
    room: int,
    draft: str,
    requests: int,
    traces: int,
    gpus: int = 8,
    heads_over: int = 1,
    host_pages: int | None = None,
) -> Setup:
    """Shapes of everything for one draft; nothing is allocated.

    Routed experts are spread over all `gpus`, heads over groups of `heads_over` of them (`split`).
    Without `host_pages`, every request has its own; with fewer than they need, requests share them.
    """
    config = split(cut(GLM_PRESETS[name], layers), heads_over)
    model = ShardModel(
        config=config,
        experts=max(1, config.num_experts // gpus),
    )
    weights = abstract_weights(config, model.experts)
    inner, draft_weights = drafter_for(draft, config, weights, model.dtype)
    queries = inner.length + 1
    i32 = lambda *shape: abstract_leaf(shape, jnp.int32)
    flag = abstract_leaf((), jnp.bool_)
    replay = Replay(
        on=flag,
        selections=i32(traces, room + queries, config.index_top_k),
        trace=i32(len(config.groups), requests),
        history=i32(),
        text=i32(requests, queries),
    )
    draft_params = ReplayedDraft(
        inner=draft_weights,
        on=flag,
        text=replay.text,
        survival=abstract_leaf((inner.length,), jnp.float32),
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )
    capacity = capacity_of(context, room)
    return Setup(
        model=model,
        drafter=replaying(inner, config.vocab_size),
        params=ShardParams(weights=weights, replay=replay),
        draft_params=draft_params if inner.length else (),
        capacity=capacity,
        host_pages=host_pages or requests * (capacity // HOST_PAGE),
    )
