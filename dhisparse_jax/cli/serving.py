"""What a replay did, over time: latencies of requests, and a sample of the engine every so often.

Knows nothing about display or files.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dhisparse_jax.engine.events import (
    Acceptance,
    Event,
    Finished,
    NewTokens,
    StepDone,
    StepMetrics,
)
from dhisparse_jax.engine.replay import Arrived

WINDOW = 256
"""Latest times per token that the percentiles of a sample are taken of."""


@dataclasses.dataclass
class Served:
    """One request: seconds from the start, and counts.

    Attributes:
        arrived: when it arrived.
        first: when its first token came; None before.
        last: when its last token so far came.
        tokens: how many.
        finish_reason: why it ended; None before.
    """

    arrived: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    finish_reason: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None before the second."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first is None else self.first - self.arrived


@dataclasses.dataclass(frozen=True)
class Sample:
    """The engine at one time, and what it did since the sample before.

    Attributes:
        seconds: from the start.
        running: requests in rows.
        waiting: requests in the queue.
        tokens_per_s: output tokens.
        tpot_p50_ms: median time per token of the latest tokens; None without any.
        tpot_p95_ms: their 95th percentile.
        resident_share: part of the history that the device has room for, 0 to 1.
        fetched_share: fetched rows as a part of the selected ones, 0 to 1.
        link_gb_per_s: host bytes read per second, in 10**9.
        accept_length: tokens per step and request.
    """

    seconds: float
    running: int
    waiting: int
    tokens_per_s: float
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    resident_share: float
    fetched_share: float
    link_gb_per_s: float
    accept_length: float


@dataclasses.dataclass
class ServingRecord:
    """A replay so far.

    Attributes:
        now: seconds from the start.
        state: requests in rows and in the queue, and the resident share.
        interval: seconds between two samples.
        requests: by number.
        samples: in order of time.
    """

    now: Callable[[], float]
    state: Callable[[], tuple[int, int, float]]
    interval: float = 1.0
    requests: dict[int, Served] = dataclasses.field(default_factory=dict)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    steps: int = 0
    _since: float = 0.0
    _tokens: int = 0
    _metrics: StepMetrics = dataclasses.field(default_factory=StepMetrics)
    _acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    _latest: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, event: Event | Arrived) -> None:
        """Take in one event, and a sample where one is due."""
        match event:
            case Arrived(number, at):
                self.requests[number] = Served(at)
            case NewTokens(number, tokens):
                self._add_tokens(self.requests[number], len(tokens))
            case Finished(number, reason):
                self.requests[number].finish_reason = reason
            case StepDone(_, metrics, acceptance):
                self.steps += 1
                self._metrics += metrics
                self._acceptance += acceptance
        if self.now() - self._since >= self.interval:
            self.sample()

    def _add_tokens(self, request: Served, count: int) -> None:
        now = self.now()
        if request.first is None:
            request.first = now
        else:
            self._latest.extend([(now - request.last) / count] * count)
        request.last = now
        request.tokens += count
        self._tokens += count

    def sample(self, ask: bool = True) -> None:
        """Note what the engine does, and begin to count anew.

        Args:
            ask: for the state of the engine, which waits for the device; else it is that of the
                sample before.
        """
        now = self.now()
        seconds = max(now - self._since, 1e-9)
        last = self.samples[-1] if self.samples else None
        before = (last.running, last.waiting, last.resident_share) if last else (0, 0, 1.0)
        running, waiting, resident = self.state() if ask else before
        middle, tail = percentiles(self._latest)
        self.samples.append(
            Sample(
                seconds=now,
                running=running,
                waiting=waiting,
                tokens_per_s=self._tokens / seconds,
                tpot_p50_ms=middle,
                tpot_p95_ms=tail,
                resident_share=resident,
                fetched_share=self._metrics.fetched_rows / max(self._metrics.selected_rows, 1),
                link_gb_per_s=self._metrics.host_bytes_read / seconds / 1e9,
                accept_length=self._acceptance.length,
            )
        )
        self._since, self._tokens = now, 0
        self._metrics, self._acceptance = StepMetrics(), Acceptance()

    def summary(self) -> dict[str, Any]:
        """The whole replay in some numbers; times per token are of requests, each counted once."""
        served = list(self.requests.values())
        tpot = percentiles([item.tpot for item in served if item.tpot is not None])
        ttft = percentiles([item.ttft for item in served if item.ttft is not None])
        end = max((item.last for item in served), default=0.0)
        tokens = sum(item.tokens for item in served)
        return {
            "requests": len(served),
            "finished": sum(item.finish_reason in ("length", "stop", "context") for item in served),
            "output_tokens": tokens,
            "steps": self.steps,
            "seconds": end,
            "tokens_per_s": tokens / end if end > 0 else 0.0,
            "tpot_p50_ms": tpot[0],
            "tpot_p95_ms": tpot[1],
            "ttft_p50_ms": ttft[0],
            "ttft_p95_ms": ttft[1],
            "most_running": max((sample.running for sample in self.samples), default=0),
        }


def percentiles(seconds: Sequence[float] | deque[float]) -> tuple[float | None, float | None]:
    """Median and 95th percentile in milliseconds; None of nothing."""
    if not seconds:
        return None, None
    middle, tail = np.percentile(np.asarray(seconds), (50, 95))
    return 1e3 * float(middle), 1e3 * float(tail)
