"""What a caller asks for."""

import dataclasses

from dhisparse_jax.errors import UserError
from dhisparse_jax.sampling import Sampling


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
