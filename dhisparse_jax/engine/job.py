"""A request on its way through the engine."""

import dataclasses
from collections.abc import Sequence

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.events import FinishReason
from dhisparse_jax.engine.exchange import Paged
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.seat import Chunk, Pieces
from dhisparse_jax.engine.session import Session
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import ServedModel
from dhisparse_jax.step import MAX_STOPS


@dataclasses.dataclass(eq=False)
class Job:
    """A request, where it is, and what it has produced.

    It waits (no row), is in prefill (a row and `prefill`), or decodes (a row).

    Attributes:
        number: names it in events.
        request: what was asked for.
        draw: number that its random draws depend on.
        rank: who goes first: the lower.
        produced: tokens emitted so far, delivered or not.
        row: where it is; None while it waits. The rows of a device follow those of the one before.
        home: the device whose row it had last; its host pages are there.
        prefill: the rest of its prefill.
        chunk: what has to be run before it goes on.
        outside: what it waits with once it has begun: its host pages, or, where these were needed,
            a session.
        reason: why it ended; it may still have tokens to deliver.
    """

    number: int
    request: Request
    draw: int
    rank: tuple[int, int] = (0, 0)
    produced: list[int] = dataclasses.field(default_factory=list)
    row: int | None = None
    home: int | None = None
    prefill: Pieces | None = None
    chunk: Chunk | None = None
    outside: Paged | Session | None = None
    reason: FinishReason | None = None

    @property
    def decoding(self) -> bool:
        """Whether the next step is to give it tokens."""
        return self.row is not None and self.prefill is None and self.reason is None

    @property
    def positions(self) -> int:
        """Committed positions while it decodes: all of its text but the last token."""
        return len(self.request.prompt) + len(self.produced) - 1

    def left(self, capacity: int) -> int:
        """Tokens that it may still produce."""
        room = capacity - 1 - self.positions
        return min(self.request.max_new_tokens - len(self.produced), room)

    def extend(self, tokens: Sequence[int], capacity: int) -> None:
        """Take in new tokens, at least one, and see whether they end it."""
        self.produced.extend(tokens)
        if tokens[-1] in self.request.stop:
            self.reason = "stop"
        elif len(self.produced) >= self.request.max_new_tokens:
            self.reason = "length"
        elif len(self.request.prompt) + len(self.produced) >= capacity:
            self.reason = "context"


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens of a job that are to be delivered, and why it ends after them, if it does.

    Attributes:
        job: whose they are.
        tokens: the tokens.
        reason: why the job ends; None: it goes on.
    """

    job: Job
    tokens: tuple[int, ...]
    reason: FinishReason | None


def check_request(
    request: Request, model: ServedModel, cfg: HierarchyConfig, proposals: int
) -> None:
    """Whether a request can ever run with a draft of so many proposals.

    Raises:
        UserError: its prompt leaves no position to write to or has a token that the model does not
            know, or it has too many stop tokens, or the hierarchy has not one verify query more
            than there are proposals.
    """
    if cfg.queries != proposals + 1:
        raise UserError(
            f"the hierarchy has {cfg.queries} verify queries per step, but a draft of {proposals} "
            f"tokens needs {proposals + 1}"
        )
    if len(request.prompt) >= cfg.capacity:
        raise UserError(
            f"{request.name}: the prompt has {len(request.prompt)} tokens, the context is "
            f"{cfg.capacity}; shorten the prompt to at most {cfg.capacity - 1}"
        )
    for token in (min(request.prompt), max(request.prompt)):
        if not 0 <= token < model.vocabulary:
            raise UserError(
                f"{request.name}: token {token} is outside the vocabulary of {model.vocabulary}"
            )
    if len(request.stop) > MAX_STOPS:
        raise UserError(
            f"{request.name}: {len(request.stop)} stop tokens; at most {MAX_STOPS} are possible"
        )
