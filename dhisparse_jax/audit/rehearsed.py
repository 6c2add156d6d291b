"""A drafter for models that have none: it knows the texts, and errs at every fourth position."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.sampling import Sampler, draw, proposal_keys
from dhisparse_jax.speculation.protocol import Draft, Proposal

OFFSETS, CHANCES = (0, 1, 2), (0.7, 0.2, 0.1)
"""Candidates beside the guess, and what each has of q where tokens are sampled."""

ERRS = 4
"""One guess in so many is wrong."""


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """Its weights are the texts, int32 [texts, C]; see `Drafter`.

    Attributes:
        vocabulary: number of token ids, at least as many as there are candidates.
        length: tokens per proposal.
        taps: none.
        window: it reads nothing.
        estimates_confidence: it does not.
    """

    vocabulary: int
    length: int
    taps: tuple[int, ...] = ()
    window: int | None = 0
    estimates_confidence: bool = False

    def init(self, requests: int) -> tuple[()]:
        """Nothing to keep."""
        return ()

    def propose(
        self,
        params: Int[Array, "texts C"],
        state: tuple[()],
        anchor: Int[Array, " R"],
        length: Int[Array, " R"],
        sampler: Sampler,
    ) -> Proposal:
        """What comes next in the first text that has the anchor where it is."""
        capacity, i32 = params.shape[1], jnp.int32
        here = params[:, jnp.minimum(length, capacity - 1)]
        text = jnp.argmax(here == anchor[None], axis=0)[:, None]
        position = length[:, None] + 1 + jnp.arange(self.length, dtype=i32)[None]
        guess = params[text, jnp.minimum(position, capacity - 1)]
        guess = jnp.where(position % ERRS == 0, guess + 1, guess)
        candidates = (guess[..., None] + jnp.asarray(OFFSETS, i32)[None, None]) % self.vocabulary
        greedy = jnp.asarray([1.0] + [0.0] * (len(OFFSETS) - 1))
        sampled = sampler.temperature[:, None, None] > 0.0
        q = jnp.where(sampled, jnp.asarray(CHANCES)[None, None], greedy[None, None])
        q = jnp.broadcast_to(q, candidates.shape)
        keys = jnp.stack([proposal_keys(sampler, length, n) for n in range(self.length)], axis=1)
        pick = jax.vmap(draw, in_axes=1, out_axes=1)(jnp.log(q), keys)
        return Proposal(
            tokens=jnp.take_along_axis(candidates, pick[..., None], axis=2)[..., 0],
            candidates=candidates,
            probabilities=q,
            confidence=jnp.ones_like(position, jnp.float32),
        )

    def commit(
        self,
        params: Int[Array, "texts C"],
        state: tuple[()],
        features: Float[Array, "R X taps"],
        start: Int[Array, " R"],
        count: Int[Array, " R"],
    ) -> tuple[()]:
        """Nothing to take in."""
        return state

    def reset(self, state: tuple[()], row: Int[Array, ""]) -> tuple[()]:
        """Nothing to forget."""
        return state


def rehearsed(vocabulary: int, texts: list[tuple[int, ...]], length: int) -> Draft:
    """The drafter that knows these texts, and proposes so many tokens."""
    room = max(map(len, texts))
    padded = [(*text, *[0] * (room - len(text))) for text in texts]
    return Draft(drafter=Rehearsed(vocabulary, length), params=jnp.asarray(padded, jnp.int32))
