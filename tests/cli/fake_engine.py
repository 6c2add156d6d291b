"""An engine and a model without arithmetic, after the engine's contract.

The model "predicts" the byte after the last one (a -> b), so that outputs are known.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dhisparse_jax.engine.events import (
    Event,
    Finished,
    NewTokens,
    PrefillProgress,
    StepDone,
    StepMetrics,
)
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models.tokenizer import ByteTokenizer, Tokenizer

PIECES = 3


@dataclass(frozen=True)
class Sizes:
    host_bytes: int = 3 << 20
    hot_bytes: int = 1 << 20
    tail_bytes: int = 2048
    staging_bytes: int = 0
    index_bytes: int = 512


@dataclass(frozen=True)
class FakeModel:
    vocab_size: int = 256
    context: int = 64


@dataclass(frozen=True)
class FakeLoaded:
    name: str = "tiny"
    model: FakeModel = FakeModel()
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    context: int = 64
    eos: tuple[int, ...] = ()


@dataclass
class FakeEngine:
    """Decodes every request together; `on_step` may raise, as Ctrl-C does."""

    context: int = 64
    sizes: Sizes = Sizes()
    on_step: Callable[[int], None] = lambda step: None

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        for index in range(len(requests)):
            for piece in range(PIECES):
                yield PrefillProgress(index, piece + 1, PIECES)
        texts = [list(request.prompt) for request in requests]
        open_requests = set(range(len(requests)))
        step = 0
        while open_requests:
            self.on_step(step)
            for index in sorted(open_requests):
                token = (texts[index][-1] + 1) % 256
                texts[index].append(token)
                yield NewTokens(index, (token,))
                reason = self._reason(requests[index], texts[index])
                if reason:
                    open_requests.discard(index)
                    yield Finished(index, reason)
            yield StepDone(step, StepMetrics(selected_rows=8, fetched_rows=2, host_bytes_read=256))
            step += 1

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """One bit for the byte that follows, two for any other."""
        pairs = zip(tokens[:-1], tokens[1:], strict=True)
        return np.array([-1.0 if b == a + 1 else -2.0 for a, b in pairs])

    def _reason(self, request: Request, text: list[int]) -> str | None:
        if text[-1] in request.stop:
            return "stop"
        if len(text) - len(request.prompt) >= request.max_new_tokens:
            return "length"
        return "context" if len(text) >= self.context else None
