"""What a caller asks for."""

import dataclasses

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import ServedModel
from dhisparse_jax.sampling import Sampling
from dhisparse_jax.step import MAX_STOPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One text to continue.

    Attributes:
        name: shown to people; need not be unique.
        prompt: token ids, at least one.
        max_new_tokens: stop after so many.
        sampling: how the next token is chosen.
        stop: token ids that end the request; the stop token is part of the output.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse empty work."""
        if not self.prompt:
            raise UserError(f"{self.name}: the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise UserError(
                f"{self.name}: max-new-tokens is {self.max_new_tokens}; it must be >= 1"
            )

    def end(self, capacity: int) -> int:
        """Position of the last token that it may emit, and how many it commits at most."""
        return min(len(self.prompt) + self.max_new_tokens, capacity) - 1


def check_request(request: Request, model: ServedModel, cfg: HierarchyConfig) -> None:
    """Whether a row can take a request.

    Raises:
        UserError: its prompt leaves no position to write to or has a token that the model does not
            know, or it has too many stop tokens.
    """
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
