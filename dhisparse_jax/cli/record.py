"""What a run did, gathered from the engine's events. Knows nothing about display or files."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dhisparse_jax.engine.events import Event, Finished, NewTokens, PrefillProgress, StepDone
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
        """"waiting", "prefill", "decoding", or why it ended."""
        if self.finish_reason is not None:
            return self.finish_reason
        if self.prefill_total and self.prefill_done == self.prefill_total:
            return "decoding"
        return "prefill" if self.prefill_done else "waiting"


@dataclass
class RunRecord:
    """A whole run so far; the counts are sums over steps, pools and requests.

    Attributes:
      requests: in the order that they were given.
      steps: decode steps.
      selected_rows: records that the steps' selections named, each once per step.
      fetched_rows: records that were read from the host pool.
      host_bytes_read: bytes of those records.
      prefill_seconds: wall time spent in prefill, compilation included.
      decode_seconds: wall time spent in decode steps, compilation included.
      first_step_seconds: the part of `decode_seconds` up to the end of the first step.
      first_step_tokens: tokens that were there by then.
    """

    requests: list[RequestRecord]
    steps: int = 0
    selected_rows: int = 0
    fetched_rows: int = 0
    host_bytes_read: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_step_seconds: float = 0.0
    first_step_tokens: int = 0
    clock: Callable[[], float] = time.perf_counter
    _last: float = 0.0

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "RunRecord":
        """An empty record; its clock starts now."""
        record = cls([RequestRecord(item.name, len(item.prompt)) for item in requests])
        record._last = record.clock()
        return record

    def add(self, event: Event) -> None:
        """Take in one event. The time since the event before it counts as that event's work."""
        self._add_time(isinstance(event, PrefillProgress))
        match event:
            case PrefillProgress(request, done, total):
                self.requests[request].prefill_done = done
                self.requests[request].prefill_total = total
            case NewTokens(request, tokens):
                self.requests[request].tokens.extend(tokens)
            case Finished(request, reason):
                self.requests[request].finish_reason = reason
            case StepDone():
                self._add_step(event)

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
    def tokens_per_s(self) -> float:
        """`output_tokens` over `seconds`."""
        return _ratio(self.output_tokens, self.seconds)

    @property
    def steady_tokens_per_s(self) -> float:
        """Tokens over time of the decode steps after the first, which compiles."""
        tokens = self.output_tokens - self.first_step_tokens
        return _ratio(tokens, self.decode_seconds - self.first_step_seconds) if self.steps else 0.0

    @property
    def fetched_share(self) -> float:
        """Fetched rows as a share of the selected ones, 0 to 1."""
        return _ratio(self.fetched_rows, self.selected_rows)

    def _add_time(self, prefill: bool) -> None:
        now = self.clock()
        if prefill:
            self.prefill_seconds += now - self._last
        else:
            self.decode_seconds += now - self._last
        self._last = now

    def _add_step(self, event: StepDone) -> None:
        self.steps += 1
        self.selected_rows += event.metrics.selected_rows
        self.fetched_rows += event.metrics.fetched_rows
        self.host_bytes_read += event.metrics.host_bytes_read
        if self.steps == 1:
            self.first_step_seconds = self.decode_seconds
            self.first_step_tokens = self.output_tokens


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
