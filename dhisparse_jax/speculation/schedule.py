"""Schedule: how many proposals of each request are worth verifying in this step.

A proposal that is verified adds its survival, the chance that it and all before it are accepted, to
the expected tokens of the step, and adds the time of one more query and of the records that this
query fetches. The schedule maximises expected tokens per second over all requests together.

Losslessness: whether proposal k of a request is verified must not depend on what token it is. Three
ways to know survivals without that, all exact for sampling (greedy decoding is exact anyhow):

early-stop  confidences of this step, which depend on the tokens before each proposal only; admit in
            order of survival and stop at the first that does not pay (DSpark, algorithm 1).
stale       how many to admit follows from the confidences of two steps before, which proposals from
            those of this step (DSpark, section 5.2). Allows a cost with steps and dips. Exact since
            a step draws its proposals anew (`sampling.proposal_keys`): those of two steps before,
            for the same positions, say nothing about them.
history     how often the target followed the draft in the steps before: for any drafter.

All queries share one retrieval, and a record that several select crosses the link once: T queries
fetch about T ** UNION_GROWTH times what one does.
"""

from enum import StrEnum

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.pytree import state as pytree

UNION_GROWTH = 0.42
"""Exponent of the union of selections of consecutive queries: 2, 4, 8 and 16 of them select 1.30,
1.75, 2.33 and 3.2 times what one does (published cache curve of GLM-5.1, LRU-stack model)."""

DECAY = 0.9
"""Weight of the past in the moving averages."""

RELAX = 0.02
"""Step back to 1 of an acceptance that was not observed, so that it is tried again some time."""

_LEAST_SECONDS = 1e-12


class Rule(StrEnum):
    """How the number of verified proposals is chosen; `all` verifies every one.

    Attributes:
        ALL: every proposal.
        EARLY_STOP: as many as pay by this step's confidences, up to the first that does not.
        STALE: as many as paid two steps before.
        HISTORY: as many as pay by how often the target followed the draft.
    """

    ALL = "all"
    EARLY_STOP = "early-stop"
    STALE = "stale"
    HISTORY = "history"


@pytree
class Profile:
    """What the machine does, measured.

    Attributes:
        step_seconds: float32 seconds of a step that verifies B queries in all, fetches left out,
            for B = 0 .. R T.
        byte_seconds: float32 seconds per byte fetched from the host.
    """

    step_seconds: Float[Array, " B"]
    byte_seconds: Float[Array, ""]


@pytree
class Load:
    """What the last steps were like. First axis: request row.

    Attributes:
        acceptance: float32 how often proposal i was accepted when all before it were, a moving
            average.
        query_bytes: float32 bytes that a single query fetches, a moving average.
        survival: float32 survivals by confidence, two steps ago and in the last step.
    """

    acceptance: Float[Array, "R N"]
    query_bytes: Float[Array, " R"]
    survival: Float[Array, "R 2 N"]


def init_load(requests: int, length: int) -> Load:
    """The load at first: every proposal is expected to be accepted, and none to fetch."""
    return Load(
        acceptance=jnp.ones((requests, length), jnp.float32),
        query_bytes=jnp.zeros(requests, jnp.float32),
        survival=jnp.ones((requests, 2, length), jnp.float32),
    )


def join_load(load: Load, row: Int[Array, ""]) -> Load:
    """A new request in row `row`: expected to be like the others were of late."""
    like = lambda values: values.at[row].set(values.mean(axis=0))
    return Load(
        acceptance=like(load.acceptance),
        query_bytes=like(load.query_bytes),
        survival=load.survival.at[row].set(1.0),
    )


def live_queries(
    rule: Rule,
    confidence: Float[Array, "R N"],
    load: Load,
    profile: Profile,
    room: Int[Array, " R"],
) -> Int[Array, " R"]:
    """Queries of every request to verify: its anchor and as many proposals as pay.

    Args:
        rule: static.
        confidence: float32 of the proposals, see `Proposal`.
        load: of the steps before.
        profile: of the machine.
        room: int32 most queries of a request; 0 for one that takes no part.
    """
    if rule is Rule.ALL or confidence.shape[1] == 0:
        return room
    expected = jnp.cumprod(load.acceptance if rule is Rule.HISTORY else confidence, axis=1)
    place, rate = throughput(expected, load, profile, room)
    if rule is Rule.EARLY_STOP:
        count = early_stop(rate)
    elif rule is Rule.STALE:
        count = best(throughput(load.survival[:, 0], load, profile, room)[1])
    else:
        count = best(rate)
    proposals = (place <= count).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(proposals + 1, room)


def throughput(
    survival: Float[Array, "R N"], load: Load, profile: Profile, room: Int[Array, " R"]
) -> tuple[Int[Array, "R N"], Float[Array, " K"]]:
    """Places of proposals by what they give for their time, and what the first k of them come to.

    The first places are a prefix of every request: none is worth more than those before it, and of
    equals the earlier comes first. All pairs are compared, and summed up in the same reduction,
    which is one small kernel on a GPU where sorting is many: 32 requests x 7 proposals are 50,000
    pairs.

    Returns:
        (place, rate): int32 places from 1; float32 expected tokens per second with the first
        k = 0 .. R N verified, -inf where there are fewer than k.
    """
    requests = (room > 0).sum(dtype=jnp.int32)
    first, more = _fetch_seconds(load, profile, survival.shape[1], room)
    possible = _possible(survival, room)
    worth = _worth(survival, more, profile, possible).reshape(-1)
    number = jnp.arange(worth.shape[0], dtype=jnp.int32)
    earlier = (worth[None] == worth[:, None]) & (number[None] <= number[:, None])
    chosen = (worth[None] > worth[:, None]) | earlier
    sums = lambda values: jnp.where(chosen, values.reshape(1, -1), 0)
    place, tokens, seconds = lax.reduce(
        (chosen.astype(jnp.int32), sums(survival), sums(more)),
        (jnp.int32(0), jnp.float32(0), jnp.float32(0)),
        lambda before, after: tuple(a + b for a, b in zip(before, after, strict=True)),
        (1,),
    )
    table, alone = profile.step_seconds, requests.astype(jnp.float32)
    time = lambda count, fetching: jnp.maximum(
        table[jnp.minimum(count, table.shape[0] - 1)] + first + fetching, _LEAST_SECONDS
    )
    rate = (alone + tokens) / time(requests + place, seconds)
    every = jnp.full(worth.shape[0] + 1, alone / time(requests, 0.0))
    every = every.at[place].set(jnp.where(possible.reshape(-1), rate, -jnp.inf))
    return place.reshape(survival.shape), every


def early_stop(rate: Float[Array, " K"]) -> Int[Array, ""]:
    """Admit while every proposal raises the throughput; never look beyond one that does not."""
    falls = jnp.append(rate[1:] <= rate[:-1], True)  # ends where proposals do
    return jnp.argmax(falls).astype(jnp.int32)


def best(rate: Float[Array, " K"]) -> Int[Array, ""]:
    """The number with the highest throughput; the smallest of equals."""
    return jnp.argmax(rate).astype(jnp.int32)


def observe(
    load: Load,
    confidence: Float[Array, "R N"],
    live: Int[Array, " R"],
    count: Int[Array, " R"],
    fetched_bytes: Float[Array, " R"],
) -> Load:
    """The load after a step.

    Args:
        load: before the step.
        confidence: of its proposals.
        live: int32 verified queries.
        count: int32 emitted tokens; 0 leaves a request's averages as they are.
        fetched_bytes: float32 bytes that each request fetched.
    """
    place = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None]
    observed = (place < live[:, None] - 1) & (place < count[:, None])
    accepted = (place < count[:, None] - 1).astype(jnp.float32)
    old = load.acceptance
    seen = DECAY * old + (1.0 - DECAY) * accepted
    acceptance = jnp.where(observed, seen, old + RELAX * (1.0 - old))
    alone = fetched_bytes / jnp.maximum(live, 1).astype(jnp.float32) ** UNION_GROWTH
    query_bytes = DECAY * load.query_bytes + (1.0 - DECAY) * alone
    survival = jnp.stack((load.survival[:, 1], jnp.cumprod(confidence, axis=1)), axis=1)
    took_part = count > 0
    return Load(
        acceptance=jnp.where(took_part[:, None], acceptance, old),
        query_bytes=jnp.where(took_part, query_bytes, load.query_bytes),
        survival=jnp.where(took_part[:, None, None], survival, load.survival),
    )


def _possible(survival: Float[Array, "R N"], room: Int[Array, " R"]) -> Bool[Array, "R N"]:
    place = jnp.arange(survival.shape[1], dtype=jnp.int32)[None]
    return place < room[:, None] - 1


def _fetch_seconds(
    load: Load, profile: Profile, length: int, room: Int[Array, " R"]
) -> tuple[Float[Array, ""], Float[Array, "R N"]]:
    """Seconds of what the anchors fetch, and of what each proposal adds to it."""
    queries = jnp.arange(length + 1, dtype=jnp.float32) + 1.0
    added = jnp.diff(queries**UNION_GROWTH)
    alone = jnp.where(room > 0, load.query_bytes, 0.0) * profile.byte_seconds
    return alone.sum(), alone[:, None] * added[None]


def _worth(
    survival: Float[Array, "R N"],
    fetch: Float[Array, "R N"],
    profile: Profile,
    possible: Bool[Array, "R N"],
) -> Float[Array, "R N"]:
    """Expected tokens per second of every proposal by itself, at most those of the one before."""
    table = profile.step_seconds
    slope = (table[-1] - table[0]) / (table.shape[0] - 1)
    worth = survival / jnp.maximum(slope + fetch, _LEAST_SECONDS)
    return jnp.where(possible, lax.cummin(worth, axis=1), -1.0)
