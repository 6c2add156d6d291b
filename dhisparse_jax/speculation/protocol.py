"""What a drafter is: any object with these members, and weights that are passed separately.

Positions: a request has S committed positions (`length`). Its anchor, the last token it emitted,
is at position S and not yet read by the target. Proposal i (from 0) is a candidate for the token at
position S + 1 + i.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, layers_per_group
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.sampling import Sampler

DraftState = Any
"""What a drafter keeps of every request: a pytree of arrays whose first axis is the request row."""


@pytree
class Proposal:
    """N proposed tokens for each request, with the distribution q that each was drawn from.

    Attributes:
        tokens: int32 proposed tokens.
        candidates: int32 tokens to which q can give mass, distinct within a proposal; -1 is none.
        probabilities: float32 q of the candidates: exactly what the token was drawn from, so a
            token chosen by argmax has q = 1, whatever its softmax was.
        confidence: float32 estimate of the chance that the proposal is accepted, given that all
            before it were; 1 where a drafter does not estimate it. May depend on proposals before
            this one, never on this one or on later ones.
    """

    tokens: Int[Array, "R N"]
    candidates: Int[Array, "R N M"]
    probabilities: Float[Array, "R N M"]
    confidence: Float[Array, "R N"]


@runtime_checkable
class Drafter(Protocol):
    """A draft model as pure functions of its weights; hashable, so that it can be static.

    Attributes:
        length: N, how many tokens it proposes per step.
        taps: target layers (from 0) that it reads (`model.Taps`). Features are what there is to
            read of them, concatenated in this order.
        window: how many of the newest committed positions it reads at most; None: all.
        estimates_confidence: whether `Proposal.confidence` says anything.
    """

    @property
    def length(self) -> int: ...  # noqa: D102

    @property
    def taps(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def window(self) -> int | None: ...  # noqa: D102

    @property
    def estimates_confidence(self) -> bool: ...  # noqa: D102

    def init(self, requests: int) -> DraftState:
        """The state of `requests` empty rows."""
        ...

    def propose(
        self,
        params: Params,
        state: DraftState,
        anchor: Int[Array, " R"],
        length: Int[Array, " R"],
        sampler: Sampler,
    ) -> Proposal:
        """Propose N tokens after every anchor; the state does not change.

        Args:
            params: weights of the draft, and what it shares with the target.
            state: features of positions 0 .. length - 1 are committed.
            anchor: int32 last emitted token, at position `length`.
            length: int32 committed positions.
            sampler: how each request chooses. A row of temperature 0 proposes its best guess. Draws
                take their keys from `sampling.proposal_keys`.
        """
        ...

    def commit(
        self,
        params: Params,
        state: DraftState,
        features: Float[Array, "R X taps"],
        start: Int[Array, " R"],
        count: Int[Array, " R"],
    ) -> DraftState:
        """Take in the target's features of positions start .. start + count - 1.

        Rows from `count` on belong to rejected tokens, and are not stored. `start` may lie beyond
        what was committed so far, if at least `window` positions follow it.
        """
        ...

    def reset(self, state: DraftState, row: Int[Array, ""]) -> DraftState:
        """Forget what row `row` held: another request joined it."""
        ...


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """The drafter that proposes nothing: a step verifies its anchor alone and emits one token.

    Attributes:
        length: no token is proposed.
        taps: no hidden state is read.
        window: no position is kept.
        estimates_confidence: there is nothing to estimate.
    """

    length: int = 0
    taps: tuple[int, ...] = ()
    window: int | None = 0
    estimates_confidence: bool = False

    def init(self, requests: int) -> DraftState:
        """Nothing to keep."""
        return ()

    def propose(
        self,
        params: Params,
        state: DraftState,
        anchor: Int[Array, " R"],
        length: Int[Array, " R"],
        sampler: Sampler,
    ) -> Proposal:
        """No tokens."""
        requests = anchor.shape[0]
        return Proposal(
            tokens=jnp.zeros((requests, 0), jnp.int32),
            candidates=jnp.zeros((requests, 0, 1), jnp.int32),
            probabilities=jnp.zeros((requests, 0, 1), jnp.float32),
            confidence=jnp.zeros((requests, 0), jnp.float32),
        )

    def commit(
        self,
        params: Params,
        state: DraftState,
        features: Float[Array, "R X taps"],
        start: Int[Array, " R"],
        count: Int[Array, " R"],
    ) -> DraftState:
        """Nothing to take in."""
        return state

    def reset(self, state: DraftState, row: Int[Array, ""]) -> DraftState:
        """Nothing to forget."""
        return state


@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafter and its weights.

    Attributes:
        drafter: its functions; static.
        params: its weights, with what it shares with the target; any pytree.
    """

    drafter: Drafter
    params: Params


NO_DRAFT = Draft(drafter=NoDraft(), params=())
"""One token per step."""


def check_draft(drafter: Drafter, cfg: HierarchyConfig) -> None:
    """Refuse a drafter that reads layers which the target does not have.

    Raises:
        UserError: with the layers.
    """
    layers = sum(layers_per_group(cfg.geometry))
    beyond = [layer for layer in drafter.taps if not 0 <= layer < layers]
    if beyond:
        raise UserError(
            f"the draft reads layer {beyond[0]} of the target, but the target has {layers} "
            f"layers (0 to {layers - 1}); use a draft that was made for this target"
        )
