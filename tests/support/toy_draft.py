"""A drafter that is sometimes right: it looks the next token up, and a hash says when to err.

It keeps the target's features of the newest positions in a ring, as a real one keeps what it
computes from them, so that a test can compare them with features computed at once.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.sampling import draw, proposal_keys
from dhisparse_jax.speculation.protocol import Draft, Proposal
from dhisparse_jax.speculation.ring import init_ring, reset_row, ring_capacity, visible, write
from dhisparse_jax.speculation.schedule import Profile

SCORES = (1.5, 0.5, 0.0)
"""Logits of the guess and of two other candidates."""

LONGEST = 512


@dataclasses.dataclass(frozen=True)
class ToyDrafter:
    """Its weights are a table, the next token after a token at a place, and how often it errs."""

    length: int = 3
    taps: tuple[int, ...] = (2, 0)
    window: int | None = 10
    positions: int | None = None
    vocabulary: int = 61
    width: int = 24
    estimates_confidence: bool = True

    def init(self, requests):
        slots = ring_capacity([self.window], self.length + 1, self.positions)
        return init_ring(requests, 1, slots, 1, self.width * len(self.taps), jnp.float32)

    def propose(self, params, state, anchor, length, sampler):
        before, places, broken = anchor, [], self._broken(state, length)
        for i in range(self.length):
            position = length + i
            wrong = broken | ((before * 7 + position * 5) % 16 < params["errs"])
            guess = params["next"][before, position]
            guess = jnp.where(wrong, guess + 5, guess) % self.vocabulary
            offsets = jnp.asarray([0, 1, 7], jnp.int32)
            candidates = (guess[:, None] + offsets[None]) % self.vocabulary
            sampled = sampler.temperature[:, None] > 0
            heat = jnp.where(sampled, sampler.temperature[:, None], 1.0)
            scores = jnp.asarray(SCORES, jnp.float32)[None] / heat
            scores = jnp.where(sampled | (offsets == 0)[None], scores, -jnp.inf)
            q = jnp.exp(scores) / jnp.exp(scores).sum(axis=1, keepdims=True)
            keys = proposal_keys(sampler, length, i)
            pick = draw(jnp.log(q), keys)
            token = jnp.take_along_axis(candidates, pick[:, None], axis=1)[:, 0]
            places.append((token, candidates, q, jnp.where(wrong, 0.1, 0.9)))
            before = token
        stacked = [jnp.stack(part, axis=1) for part in zip(*places, strict=True)]
        tokens, candidates, q, confidence = stacked
        return Proposal(
            tokens=tokens, candidates=candidates, probabilities=q, confidence=confidence
        )

    def _broken(self, ring, length):
        """Whether a request's block sees a NaN in the ring: then all its guesses are wrong."""
        rows = length[:, None] + jnp.arange(self.length + 1, dtype=jnp.int32)[None]
        _, seen = visible(ring, rows, self.window)
        shown = seen.any(axis=1)[:, None, :, None, None]
        return jnp.isnan(jnp.where(shown, ring.keys, 0.0).sum(axis=(1, 2, 3, 4)))

    def commit(self, params, state, features, start, count):
        row = features[:, None, :, None].astype(jnp.float32)
        return write(state, row, -row, start, count)

    def reset(self, state, row):
        return reset_row(state, row)


def toy_draft(texts=(), errs=5, **options):
    """A toy draft that knows these texts: sequences of tokens from position 0 on.

    Args:
        texts: what to propose.
        errs: this many in every 16 guesses are wrong.
        options: fields of the drafter.
    """
    drafter = ToyDrafter(**options)
    table = np.zeros((drafter.vocabulary, LONGEST), np.int32)
    for text in texts:
        for position, (token, after) in enumerate(itertools.pairwise(text)):
            table[token, position] = after
    return Draft(drafter=drafter, params={"next": jnp.asarray(table), "errs": jnp.int32(errs)})


def with_errs(engine, errs):
    """The same engine with a draft that errs as often as this."""
    engine.draft_params |= {"errs": jax.device_put(jnp.int32(errs), jax.devices()[0])}
    return engine


class FixedMeter:
    """Stands in for what an engine measures: a step of a second, and this much per fetched byte."""

    def __init__(self, cfg, byte_seconds):
        self.profile = Profile(
            step_seconds=jnp.ones(cfg.requests * cfg.queries + 1, jnp.float32),
            byte_seconds=jnp.float32(byte_seconds),
        )

    def add(self, seconds, records):
        """Keep the profile as it is."""
