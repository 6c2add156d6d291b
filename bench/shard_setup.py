"""What the cells of a decode benchmark have in common: the model, the drafts, what is replayed."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from bench.pinned import placed
from bench.replayed import ReplayedDraft
from bench.shard_cells import Cell, replaying
from bench.shard_glm import glm_shard
from bench.shard_protocol import Shard
from bench.shard_replay import Replay, ShardParams
from bench.shard_v41 import V41_SIZES, v41_shard
from bench.shard_weights import abstract_leaf
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.configs.presets import GLM_PRESETS
from dhisparse_jax.errors import UserError
from dhisparse_jax.speculation.protocol import Drafter
from pallas_kernels.common.rows import WORD_BYTES

HOST_PAGE = 16


@cache
def shard_of(name: str, layers: int | None, gpus: int, heads_over: int = 1) -> Shard:
    """One GPU's share of a model, or of its first layers.

    Routed experts are spread over all GPUs, heads over groups of `heads_over` of them.

    Raises:
        UserError: there is no such model, or its heads are not spread over so many.
    """
    if name in V41_SIZES:
        if heads_over != 1:
            raise UserError(f"heads of {name} are spread over no {heads_over} GPUs, only over 1")
        return v41_shard(name, layers, gpus)
    if name not in GLM_PRESETS:
        names = ", ".join((*GLM_PRESETS, *V41_SIZES))
        raise UserError(f"no shares of {name!r} are made; use one of {names}")
    return glm_shard(name, layers, gpus, heads_over)


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

    model: Shard
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


def host_requests(model: Shard, capacity: int, most: int, host_bytes: int) -> int:
    """Requests of so many positions, at most `most`, whose records and keys pinned memory holds."""
    probe = HierarchyConfig(
        geometry=model.geometry,
        policy=Policy.FIXED,
        requests=1,
        capacity=capacity,
        hot_rows=1,
        host_page=HOST_PAGE,
    )
    words = [
        each
        for pool in range(probe.pools)
        for each in (
            probe.host_rows(pool) * probe.record_words(pool),
            probe.host_rows(pool) * probe.key_words,
        )
    ]
    fits = lambda count: placed([WORD_BYTES * count * each for each in words], host_bytes)
    return next((count for count in range(most, 0, -1) if fits(count)), 0)


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

    Routed experts are spread over all `gpus`, heads over groups of `heads_over` of them.
    Without `host_pages`, every request has its own; with fewer than they need, requests share them.
    """
    model = shard_of(name, layers, gpus, heads_over)
    weights, config = model.abstract_weights(), model.config
    inner, draft_weights = model.draft(draft, weights)
    queries = inner.length + 1
    i32 = lambda *shape: abstract_leaf(shape, jnp.int32)
    flag = abstract_leaf((), jnp.bool_)
    replay = Replay(
        on=flag,
        selections=i32(
            traces * len(set(model.geometry.rates or (1,))), room + queries, config.index_top_k
        ),
        trace=i32(sum(model.selections), requests),
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
