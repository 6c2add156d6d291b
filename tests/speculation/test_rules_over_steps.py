"""Sampled texts under a rule that knows earlier steps: tokens are the target's all the same.

Target and draft are the same fair coin, so every token of a text is one, and every proposal that is
verified is accepted. The draft is sure of its proposals, but of the last one only after heads, and
verification pays for all of them or for none. So the toss before it decides how many proposals are
verified two steps later (stale), when its position comes first if nothing was verified meanwhile.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dhisparse_jax import sampling
from dhisparse_jax.sampling import Purpose, Sampling, draw, position_keys, sampler_row
from dhisparse_jax.speculation.accept import accept
from dhisparse_jax.speculation.protocol import Proposal
from dhisparse_jax.speculation.schedule import (
    Profile,
    Rule,
    init_load,
    live_queries,
    observe,
)

N, STEPS, TEXTS = 4, 24, 20_000
FIRST, LAST = 14, 22
"""Positions that are looked at: some steps after the first, and reached by every text."""
LEAK = 5.0 / np.sqrt(4 * TEXTS)
"""Five standard errors of a share of heads."""
PROFILE = Profile(
    step_seconds=jnp.asarray([1.0, 1.0, 4.4, 4.4, 4.4, 4.4]), byte_seconds=jnp.float32(0.0)
)
"""Four sure proposals give 4.9 tokens in 4.4; three give 3.9, and none gives 1 in 1."""


def proposed(sampler, length):
    """Tosses, and how sure the draft is of each."""
    tokens, confidence = [], []
    for place in range(N):
        sure = jnp.where(tokens[-1] == 0, 0.99, 0.01) if place == N - 1 else jnp.full(1, 0.99)
        confidence.append(sure)
        tokens.append(draw(jnp.zeros((1, 2)), sampling.proposal_keys(sampler, length, place)))
    return Proposal(
        tokens=jnp.stack(tokens, axis=1),
        candidates=jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (1, N, 2)),
        probabilities=jnp.full((1, N, 2), 0.5),
        confidence=jnp.stack(confidence, axis=1).astype(jnp.float32),
    )


def text(rule, seed):
    """The tokens of one text by position, and how many queries its steps verified."""
    sampler = sampler_row(Sampling(temperature=1.0), 0)
    sampler = dataclasses.replace(sampler, key=jax.random.fold_in(sampler.key[0], seed)[None])

    def step(carry, _):
        length, load, tokens = carry
        proposal = proposed(sampler, length)
        room = jnp.full(1, N + 1, jnp.int32)
        live = live_queries(rule, proposal.confidence, load, PROFILE, room)
        emitted = accept(jnp.zeros((1, N + 1, 2)), proposal, live, length, sampler)
        place = jnp.arange(N + 1, dtype=jnp.int32)
        at = jnp.where(place < emitted.count[0], length[0] + 1 + place, tokens.size)
        tokens = tokens.at[at].set(emitted.tokens[0], mode="drop")
        load = observe(load, proposal.confidence, live, emitted.count, jnp.zeros(1))
        return (length + emitted.count, load, tokens), live[0]

    start = (
        jnp.full(1, 5, jnp.int32),
        init_load(1, N),
        jnp.full((N + 1) * STEPS + 8, -1, jnp.int32),
    )
    (_, _, tokens), live = lax.scan(step, start, length=STEPS)
    return tokens[FIRST:LAST], live


def heads(rule):
    """Share of heads at every position, and the lengths of verification that there were."""
    seeds = jnp.arange(TEXTS, dtype=jnp.uint32)
    tokens, live = jax.device_get(jax.jit(jax.vmap(partial(text, rule)))(seeds))
    assert (tokens >= 0).all()
    return (tokens == 0).mean(axis=0), set(live.ravel().tolist())


def test_tokens_are_the_targets():
    share, lengths = heads(Rule.STALE)
    assert lengths == {1, N + 1}
    assert np.abs(share - 0.5).max() < LEAK


def test_the_same_draws_in_every_step_would_be_noticed(monkeypatch):
    """One draw for a position, in whichever step: its own past decides whether it is verified."""
    old = lambda sampler, length, number: position_keys(
        sampler, length + 1 + number, Purpose.PROPOSE
    )
    monkeypatch.setattr(sampling, "proposal_keys", old)
    share, _ = heads(Rule.STALE)
    assert np.abs(share - 0.5).max() > LEAK
