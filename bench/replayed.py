"""What a decode benchmark replays: selections of calibrated traces, and acceptance.

The draft model proposes for real, with random weights, which no target follows. So the target is
made to choose known tokens (`bench.shard_model.Replay.text`), and of the proposals as many are
replaced by them, from the first on, as an acceptance profile says. Everything between, the
comparison included, is the library's own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from bench.script import script
from bench.traces import trace
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.sampling import Sampler
from dhisparse_jax.speculation.protocol import Drafter, DraftState, Proposal


@pytree
class ReplayedDraft:
    """Weights of a drafter whose proposals are replaced.

    Attributes:
        inner: weights of the drafter.
        on: whether proposals are replaced.
        text: what the target chooses.
        survival: float32 profile, see `PUBLISHED_SURVIVAL`.
        key: of the draws.
    """

    inner: Any
    on: Bool[Array, ""]
    text: Int[Array, "R T"]
    survival: Float[Array, " N"]
    key: Key[Array, ""]


@dataclasses.dataclass(frozen=True)
class ReplayedDrafter:
    """A drafter as a `speculation.protocol.Drafter` with replayed acceptance."""

    drafter: Drafter
    vocabulary: int

    @property
    def length(self) -> int:
        """Tokens proposed per step."""
        return self.drafter.length

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose hidden states it reads."""
        return self.drafter.taps

    @property
    def window(self) -> int | None:
        """Newest committed positions that it reads; None: all."""
        return self.drafter.window

    @property
    def estimates_confidence(self) -> bool:
        """Whether proposals carry a confidence."""
        return self.drafter.estimates_confidence

    def init(self, requests: int) -> DraftState:
        """See `speculation.protocol.Drafter`."""
        return self.drafter.init(requests)

    def propose(
        self,
        params: ReplayedDraft,
        state: DraftState,
        anchor: Int[Array, " R"],
        length: Int[Array, " R"],
        sampler: Sampler,
    ) -> Proposal:
        """The drafter's proposal, with tokens that the target follows as the profile says."""
        proposal = self.drafter.propose(params.inner, state, anchor, length, sampler)
        if not self.length:
            return proposal
        accepted = accepted_proposals(params.key, params.survival, length)[:, None]
        place = jnp.arange(self.length, dtype=jnp.int32)[None]
        wanted = params.text[:, : self.length]
        wanted = jnp.where(place < accepted, wanted, (wanted + 1) % self.vocabulary)
        tokens = jnp.where(params.on, wanted, proposal.tokens)
        return dataclasses.replace(proposal, tokens=tokens)

    def commit(
        self,
        params: ReplayedDraft,
        state: DraftState,
        features: Float[Array, "R X taps"],
        start: Int[Array, " R"],
        count: Int[Array, " R"],
    ) -> DraftState:
        """See `speculation.protocol.Drafter`."""
        return self.drafter.commit(params.inner, state, features, start, count)

    def reset(self, state: DraftState, row: Int[Array, ""]) -> DraftState:
        """See `speculation.protocol.Drafter`."""
        return self.drafter.reset(state, row)


def accepted_proposals(
    key: Key[Array, ""], survival: Float[Array, " N"], length: Int[Array, " R"]
) -> Int[Array, " R"]:
    """How many proposals of each request stand; i or more with probability `survival[i - 1]`.

    One draw for every request and position, so all policies accept alike.
    """
    request = jnp.arange(length.shape[0], dtype=jnp.uint32)
    draw = lambda row, at: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), at))
    chance = jax.vmap(draw)(request, length.astype(jnp.uint32))
    return (chance[:, None] < survival[None]).sum(axis=1, dtype=jnp.int32)


def selections(
    count: int, *, k: int, history: int, rows: int, rate: int = 1
) -> Int[np.ndarray, "traces rows K"]:
    """What so many texts select from position `history` on, ascending.

    Positions are named in the order of their last selection, so what an admission keeps, the newest
    positions, is what a cache in steady state would hold. Where a record stands for `rate`
    positions, which must divide `history`, records take the place of positions.
    """
    made = [
        trace(k=k, history=history // rate, steps=rows, rate=rate, seed=seed)
        for seed in range(count)
    ]
    return np.sort(script(made).windows[:, :, 0], axis=-1)


def followed(selections: int, requests: int, traces: int) -> Int[np.ndarray, "selections R"]:
    """Which trace each selection and request follows: no two of one the same, if there are enough.

    The selections of a request follow different ones. Every pool is planned by itself, so it does
    not matter to the figures that another request has the same trace in another pool.
    """
    number, request = np.arange(selections)[:, None], np.arange(requests)[None]
    return ((request + 5 * number) % traces).astype(np.int32)
