"""One decode step. Reads top to bottom as the design; the stage names are those of a profile."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.adapt import adapt
from dhisparse_jax.hierarchy.backup import backup
from dhisparse_jax.hierarchy.commit import commit
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.sampling import Sampler, greedy
from dhisparse_jax.speculation.accept import Emitted, accept, stop_at
from dhisparse_jax.speculation.protocol import Drafter, DraftState, Proposal
from dhisparse_jax.speculation.schedule import Load, Profile, Rule, live_queries, observe
from dhisparse_jax.verify import forward
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.plan.types import PlanCounts


@pytree
class Texts:
    """What every request row is writing.

    Attributes:
        anchor: int32 last emitted token, at position `length`; the target has not read it yet.
        end: int32 position of the last token that the request may emit, below the capacity. A
            request whose length has reached it is done: it takes part in no step any more.
        stop: int32 tokens that end the request; NO_SLOT fills up.
        sampler: how it chooses.
    """

    anchor: Int[Array, " R"]
    end: Int[Array, " R"]
    stop: Int[Array, "R M"]
    sampler: Sampler


MAX_STOPS = 16
"""Stop tokens that a request may have."""


def no_texts(requests: int) -> Texts:
    """Rows that write nothing."""
    return Texts(
        anchor=jnp.zeros(requests, jnp.int32),
        end=jnp.zeros(requests, jnp.int32),
        stop=jnp.full((requests, MAX_STOPS), NO_SLOT, jnp.int32),
        sampler=greedy(requests),
    )


@pytree
class DecodeState:
    """All that a step changes; donate it.

    Attributes:
        hierarchy: the target's history.
        draft: what the drafter keeps of it.
        load: what the last steps were like.
        texts: what is being written.
    """

    hierarchy: HierarchyState
    draft: DraftState
    load: Load
    texts: Texts


@pytree
class StepOutput:
    """What a step tells the host.

    Attributes:
        tokens: int32 tokens that every request emitted; undefined from `count` on.
        count: int32 how many: accepted proposals and one more; 0 for a request that is done.
        verified: int32 queries that were verified; 0 for a request that is done.
        records: records per pool and request.
        selection: int32 what every query selected, as `HierarchyState.selection`; K is 0 unless
            selections are recorded.
    """

    tokens: Int[Array, "R T"]
    count: Int[Array, " R"]
    verified: Int[Array, " R"]
    records: PlanCounts
    selection: Int[Array, "pools R T K"]


@pytree
class Asked:
    """What a step puts to the model.

    Attributes:
        proposal: the drafter's.
        live: int32 how many queries of each request are verified.
        block: int32 their tokens: the anchor, and what is proposed.
    """

    proposal: Proposal
    live: Int[Array, " R"]
    block: Int[Array, "R T"]


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Who proposes, and how much of it is verified; static.

    Attributes:
        drafter: proposes N tokens per step; `NoDraft` none.
        rule: chooses how many of them are verified.
    """

    drafter: Drafter
    rule: Rule = Rule.ALL


def decode_step(
    model: ServedModel,
    speculation: Speculation,
    cfg: HierarchyConfig,
    params: Params,
    draft_params: Params,
    profile: Profile,
    state: DecodeState,
) -> tuple[StepOutput, DecodeState]:
    """Propose tokens for every request, verify them together, and keep what stands.

    Args:
        model: the served model; static.
        speculation: who proposes; static.
        cfg: sizes of the hierarchy, with N + 1 verify queries; static.
        params: weights of the model.
        draft_params: weights of the drafter.
        profile: of the machine, for the rule.
        state: the requests; donate it.
    """
    asked = ask(speculation, cfg, draft_params, profile, state)
    logits, features, hierarchy = forward(
        model,
        cfg,
        params,
        state.hierarchy,
        asked.block,
        live=asked.live,
        taps=speculation.drafter.taps,
    )
    return settle(speculation, cfg, draft_params, state, asked, logits, features, hierarchy)


def ask(
    speculation: Speculation,
    cfg: HierarchyConfig,
    draft_params: Params,
    profile: Profile,
    state: DecodeState,
) -> Asked:
    """Propose tokens for every request, and say how many of them are verified."""
    hierarchy, texts = state.hierarchy, state.texts
    start = hierarchy.length
    with jax.named_scope("propose"):
        proposal = speculation.drafter.propose(
            draft_params, state.draft, texts.anchor, start, texts.sampler
        )
    with jax.named_scope("schedule"):
        room = jnp.where(hierarchy.active, jnp.clip(texts.end - start, 0, cfg.queries), 0)
        live = live_queries(speculation.rule, proposal.confidence, state.load, profile, room)
        block = jnp.concatenate((texts.anchor[:, None], proposal.tokens), axis=1)
    return Asked(proposal=proposal, live=live, block=block)


def settle(
    speculation: Speculation,
    cfg: HierarchyConfig,
    draft_params: Params,
    state: DecodeState,
    asked: Asked,
    logits: Float[Array, "R T V"],
    features: Float[Array, "R T taps"],
    hierarchy: HierarchyState,
) -> tuple[StepOutput, DecodeState]:
    """Accept what stands, and go on from there.

    Args:
        speculation: who proposed.
        cfg: sizes of the hierarchy.
        draft_params: weights of the drafter.
        state: what the step began with.
        asked: what was verified.
        logits: what the model said; see `forward`.
        features: for the drafter, likewise.
        hierarchy: as the model left it.
    """
    start, texts = state.hierarchy.length, state.texts
    with jax.named_scope("accept"):
        emitted = accept(logits, asked.proposal, asked.live, start, texts.sampler)
        emitted, stopped = stop_at(emitted, texts.stop)
    hierarchy = finish_step(hierarchy, cfg, emitted.count)
    with jax.named_scope("draft"):
        draft = speculation.drafter.commit(
            draft_params, state.draft, features, start, emitted.count
        )
    fetched = fetched_bytes(cfg, hierarchy.counts)
    load = observe(state.load, asked.proposal.confidence, asked.live, emitted.count, fetched)
    texts = _advance(texts, emitted, jnp.where(stopped, hierarchy.length, texts.end))
    output = StepOutput(
        tokens=emitted.tokens,
        count=emitted.count,
        verified=asked.live,
        records=hierarchy.counts,
        selection=_selection(hierarchy, cfg),
    )
    return output, DecodeState(hierarchy=hierarchy, draft=draft, load=load, texts=texts)


def decode_steps(
    steps: int,
    model: ServedModel,
    speculation: Speculation,
    cfg: HierarchyConfig,
    params: Params,
    draft_params: Params,
    profile: Profile,
    state: DecodeState,
) -> tuple[StepOutput, DecodeState]:
    """`steps` decode steps in one dispatch; every leaf of the output gets a first axis of steps."""
    step = partial(decode_step, model, speculation, cfg, params, draft_params, profile)

    def one(state: DecodeState, _: None) -> tuple[DecodeState, StepOutput]:
        output, state = step(state)
        return state, output

    if steps == 1:  # without a loop, host pools surely stay where they are
        state, output = one(state, None)
        return jax.tree.map(lambda leaf: leaf[None], output), state
    state, output = lax.scan(one, state, None, length=steps)
    return output, state


def finish_step(
    state: HierarchyState, cfg: HierarchyConfig, accepted: Int[Array, " R"]
) -> HierarchyState:
    """Commit the accepted positions, back their records up, and set the next budgets."""
    start = state.length
    with jax.named_scope("commit"):
        state = commit(state, cfg, accepted)
    with jax.named_scope("backup"):
        state = backup(state, cfg, start)
    with jax.named_scope("adapt"):
        return adapt(state, cfg)


def fetched_bytes(cfg: HierarchyConfig, records: PlanCounts) -> Float[Array, " R"]:
    """Bytes that each request fetched from the host in a step, padding included."""
    sizes = jnp.asarray([cfg.record_bytes(pool) for pool in range(cfg.pools)])
    # In float32: a step of many requests can fetch more than 2**31 bytes.
    return (records.fetched.astype(jnp.float32) * sizes[:, None].astype(jnp.float32)).sum(axis=0)


def _selection(state: HierarchyState, cfg: HierarchyConfig) -> Int[Array, "pools R T K"]:
    if state.selection is None:
        return jnp.zeros((cfg.pools, cfg.requests, cfg.queries, 0), jnp.int32)
    return state.selection


def _advance(texts: Texts, emitted: Emitted, end: Int[Array, " R"]) -> Texts:
    """The last emitted token is the next anchor; a request that emitted none keeps its own."""
    last = jnp.maximum(emitted.count - 1, 0)[:, None]
    newest = jnp.take_along_axis(emitted.tokens, last, axis=1)[:, 0]
    anchor = jnp.where(emitted.count > 0, newest, texts.anchor)
    return dataclasses.replace(texts, anchor=anchor, end=end)
