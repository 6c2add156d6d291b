"""What a run did, gathered from the engine's events. Knows nothing about display or files."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dhisparse_jax.engine.events import (
    Acceptance,
    Event,
    Finished,
    NewTokens,
    PrefillProgress,
    StepDone,
    StepMetrics,
)
from dhisparse_jax.engine.request import Request

INTERRUPTED = "interrupted"


@dataclass
class RequestRecord:
    """One request so far.

    Attributes:
        name: as the request's.
        prompt_tokens: length of the prompt in tokens.
        tokens: what was generated.
        prefill_done: finished pieces of the prefill, of `prefill_total`.
        finish_reason: "length", "stop", "context", "interrupted"; None while it runs or waits.
    """

    name: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    prefill_done: int = 0
    prefill_total: int = 0
    finish_reason: str | None = None

    @property
    def stage(self) -> str:
        """What it does: "waiting", "prefill", "decoding", or why it ended."""
        if self.finish_reason is not None:
            return self.finish_reason
        if self.prefill_total and self.prefill_done == self.prefill_total:
            return "decoding"
        return "prefill" if self.prefill_done else "waiting"


@dataclass
class RunRecord:
    """A whole run so far.

    Attributes:
        requests: in the order that they were given.
        steps: decode steps.
        totals: what the steps read, over all of them.
        acceptance: how far the target followed the draft.
        draft_seconds: the part of `decode_seconds` that the draft took: steps times the time of a
            proposal and its commit, measured by themselves after the run. None: not measured.
        prefill_seconds: wall time of prefill and of each request's first token.
        decode_seconds: wall time of decode steps.
        first_step_seconds: the part of `decode_seconds` up to the end of the first dispatch.
        steady_tokens: tokens of the dispatches after the first.
    """

    requests: list[RequestRecord]
    steps: int = 0
    totals: StepMetrics = field(default_factory=StepMetrics)
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_seconds: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_step_seconds: float = 0.0
    steady_tokens: int = 0
    clock: Callable[[], float] = time.perf_counter
    _last: float = 0.0
    _dispatches: int = 0
    _in_steps: bool = False

    @classmethod
    def of(
        cls, requests: Sequence[Request], clock: Callable[[], float] = time.perf_counter
    ) -> "RunRecord":
        """An empty record; its clock starts now."""
        records = [RequestRecord(item.name, len(item.prompt)) for item in requests]
        return cls(records, clock=clock, _last=clock())

    def add(self, event: Event) -> None:
        """Take in one event. The time since the event before it counts as that event's work."""
        self._add_time(event)
        steps = isinstance(event, StepDone)
        self._dispatches += steps and not self._in_steps  # its steps come one after the other
        self._in_steps = steps
        match event:
            case PrefillProgress(request, done, total):
                self.requests[request].prefill_done = done
                self.requests[request].prefill_total = total
            case NewTokens(request, tokens):
                if self.requests[request].tokens and self._dispatches > 1:
                    self.steady_tokens += len(tokens)
                self.requests[request].tokens.extend(tokens)
            case Finished(request, reason):
                self.requests[request].finish_reason = reason
            case StepDone(_, metrics, acceptance):
                self.steps += 1
                self.totals += metrics
                self.acceptance += acceptance
                if self.steps == 1:
                    self.first_step_seconds = self.decode_seconds

    def interrupt(self) -> None:
        """Mark what had not finished."""
        for request in self.requests:
            request.finish_reason = request.finish_reason or INTERRUPTED

    @property
    def output_tokens(self) -> int:
        """Tokens generated, over all requests."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def seconds(self) -> float:
        """Wall time of the run: prefill, decode and their compilation; not loading."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def verify_seconds(self) -> float | None:
        """The part of `decode_seconds` that is not the draft's."""
        if self.draft_seconds is None:
            return None
        return max(self.decode_seconds - self.draft_seconds, 0.0)

    @property
    def tokens_per_s(self) -> float:
        """`output_tokens` over `seconds`."""
        return _ratio(self.output_tokens, self.seconds)

    @property
    def steady_tokens_per_s(self) -> float:
        """Tokens over time of the dispatches after the first, which compiles; 0 without any."""
        return _ratio(self.steady_tokens, self.decode_seconds - self.first_step_seconds)

    @property
    def fetched_share(self) -> float:
        """Fetched rows as a share of the selected ones, 0 to 1."""
        return _ratio(self.totals.fetched_rows, self.totals.selected_rows)

    def _add_time(self, event: Event) -> None:
        now = self.clock()
        # Prefill runs asynchronously: what waits for it is the request's first token.
        first = isinstance(event, NewTokens) and not self.requests[event.request].tokens
        if first or isinstance(event, PrefillProgress):
            self.prefill_seconds += now - self._last
        else:
            self.decode_seconds += now - self._last
        self._last = now


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
