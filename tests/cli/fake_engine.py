"""An engine and a model without arithmetic, after the engine's contract, for tests of the command.

The model continues with the byte after the last one (a, b, c, ...), so that outputs are known.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dhisparse_jax.engine.events import (
    Acceptance,
    Event,
    Finished,
    NewTokens,
    PrefillProgress,
    StepDone,
    StepMetrics,
)
from dhisparse_jax.engine.memory import Sizes
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models.tokenizer import ByteTokenizer, Tokenizer

PIECES = 3
CONTEXT = 64
ACCEPTANCE = Acceptance(blocks=1, verified=(1, 1), accepted=(1, 0))
METRICS = StepMetrics(selected_rows=8, hit_rows=5, tail_rows=1, fetched_rows=2, host_bytes_read=256)
SIZES = Sizes(
    host_bytes=3 << 20,
    hot_bytes=1 << 20,
    tail_bytes=2048,
    staging_bytes=0,
    index_bytes=512,
    table_bytes=64,
)


@dataclass(frozen=True)
class FakeModel:
    vocabulary: int = 256


@dataclass(frozen=True)
class FakeLoaded:
    name: str = "tiny"
    model: FakeModel = field(default_factory=FakeModel)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    context: int = CONTEXT
    eos: tuple[int, ...] = ()


@dataclass
class FakeEngine:
    """Decodes all requests together; `on_step` may raise, as Ctrl-C does."""

    context: int = CONTEXT
    sizes: Sizes = SIZES
    on_step: Callable[[int], None] = lambda step: None

    def draft_step_seconds(self) -> float:
        return 0.25

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        texts = [list(request.prompt) for request in requests]
        for index in range(len(requests)):
            for piece in range(PIECES):
                yield PrefillProgress(index, piece + 1, PIECES)
            yield from self._advance(index, requests[index], texts[index])
        step = 0
        while still := [i for i in range(len(requests)) if not self._reason(requests[i], texts[i])]:
            step += 1
            self.on_step(step)
            yield StepDone(step, METRICS, ACCEPTANCE)
            for index in still:
                yield from self._advance(index, requests[index], texts[index])

    def _advance(self, index: int, request: Request, text: list[int]) -> Iterator[Event]:
        token = (text[-1] + 1) % 256
        text.append(token)
        yield NewTokens(index, (token,))
        reason = self._reason(request, text)
        if reason:
            yield Finished(index, reason)

    def _reason(self, request: Request, text: list[int]) -> str | None:
        if len(text) > len(request.prompt) and text[-1] in request.stop:
            return "stop"
        if len(text) - len(request.prompt) >= request.max_new_tokens:
            return "length"
        return "context" if len(text) >= self.context else None


def successor_logits(tokens: Sequence[int], vocabulary: int = 256) -> np.ndarray:
    """Probability 1/2 for the token after each one, the rest shared by the others."""
    logits = np.zeros((len(tokens), vocabulary), np.float32)
    following = (np.asarray(tokens) + 1) % vocabulary
    logits[np.arange(len(tokens)), following] = np.log(vocabulary - 1)
    return logits


def fake_teacher_force(
    engine: FakeEngine, tokens: Sequence[int], split: int
) -> Iterator[Event | np.ndarray]:
    """Pieces of the sizes that the engine gives: prefilled ones, then a step's each."""
    logits = successor_logits(tokens)
    yield PrefillProgress(0, 1, 1)
    yield logits[:split]
    for step, start in enumerate(range(split, len(tokens), 16), start=1):
        yield logits[start : start + 16]
        yield StepDone(step, METRICS)
