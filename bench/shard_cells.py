"""Cells of the decode benchmark: a policy and a draft at a load, and its state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int

from bench.replayed import ReplayedDraft, ReplayedDrafter
from bench.shard_replay import ShardParams
from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.engine.output import Packed, places
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy.state import HierarchyState, abstract
from dhisparse_jax.speculation.protocol import Drafter, DraftState, NoDraft
from dhisparse_jax.speculation.ring import Ring
from dhisparse_jax.speculation.schedule import Profile, init_load
from dhisparse_jax.step import DecodeState, no_texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured.

    Attributes:
        name: of the row in the result.
        policy: how budgets are set.
        draft: name of the draft, or "none".
        requests: at the same time.
        hot_rows: hot slots per request and pool, on average.
    """

    name: str
    policy: Policy
    draft: str
    requests: int
    hot_rows: int

    def config(
        self, geometry: Geometry, capacity: int, queries: int, pages: int
    ) -> HierarchyConfig:
        """Sizes of its hierarchy; `pages` of host memory, whatever the cell."""
        return HierarchyConfig(
            geometry=geometry,
            policy=self.policy,
            requests=self.requests,
            capacity=capacity,
            queries=queries,
            hot_rows=self.hot_rows,
            tail=usual_tail(queries),
            host_pages=pages,
        )


def replaying(drafter: Drafter, vocabulary: int) -> Drafter:
    """A drafter with replayed acceptance, if it proposes anything."""
    return ReplayedDrafter(drafter, vocabulary) if drafter.length else NoDraft()


def full_ring(state: DraftState, history: int) -> DraftState:
    """Draft rings as they are after `history` positions, with random content; words are zeros."""
    if not isinstance(state, Ring):
        return state
    keys, values = (
        jax.random.normal(jax.random.key(number), leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for number, leaf in enumerate((state.keys, state.values))
    )
    return Ring(keys=keys, values=values, next=jnp.full_like(state.next, history))


def decode_state(
    cfg: HierarchyConfig,
    drafter: Drafter,
    hierarchy: HierarchyState,
    text: Int[Array, "R T"],
    history: int,
) -> DecodeState:
    """Everything that a step changes, for requests that have just been admitted."""
    texts = no_texts(cfg.requests)
    texts = dataclasses.replace(
        texts, anchor=text[:, 0], end=jnp.full_like(texts.end, cfg.capacity - cfg.queries)
    )
    device = SingleDeviceSharding(jax.devices()[0])
    return DecodeState(
        hierarchy=hierarchy,  # its leaves are where they belong
        draft=jax.device_put(full_ring(drafter.init(cfg.requests), history), device),
        load=jax.device_put(init_load(cfg.requests, drafter.length), device),
        texts=jax.device_put(texts, device),
    )


def no_profile(cfg: HierarchyConfig) -> Profile:
    """The rule is to verify all, which asks for no profile."""
    table = jnp.zeros(cfg.requests * cfg.queries + 1, jnp.float32)
    return Profile(step_seconds=table, byte_seconds=jnp.zeros((), jnp.float32))


def abstract_operands(
    cfg: HierarchyConfig, drafter: Drafter, params: ShardParams, draft: ReplayedDraft | tuple[()]
) -> tuple[Any, ...]:
    """Shapes of what a step takes, for a compilation without a device."""
    rows, t = cfg.requests, cfg.queries
    state = DecodeState(
        hierarchy=abstract(cfg),
        draft=jax.eval_shape(lambda: drafter.init(rows)),
        load=jax.eval_shape(lambda: init_load(rows, t - 1)),
        texts=jax.eval_shape(lambda: no_texts(rows)),
    )
    place: Packed = jax.eval_shape(lambda: places(cfg, 1)[0])
    profile = jax.eval_shape(lambda: no_profile(cfg))
    return params, draft, profile, state, place
