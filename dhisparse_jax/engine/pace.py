"""Pace: how many requests may run at once, and how much is prefilled between two steps.

Without a bound, as many as there are rows, and every prompt at once: most tokens per second. With a
bound on the time per output token, the number is probed: one more while the 95th percentile of the
latest times is well below the bound, fewer as soon as it exceeds it. What a verification costs and
gives is the schedule's business: it maximises tokens per second of the requests that run, which is
to minimise their mean time per token.
"""

import dataclasses
from collections import deque

import numpy as np

from dhisparse_jax.errors import UserError

WINDOW = 64
"""Latest times per token that the 95th percentile is taken of."""

LEAST = 16
"""Times that a decision needs."""

ROOM = 0.8
"""Share of the bound below which one more request is tried."""

QUARANTINE = 8
"""Dispatches after a reduction in which nobody is added, doubled by every further reduction."""

LONGEST_QUARANTINE = 512

DECAY = 0.8
"""Weight of the past in the moving averages of seconds."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine is held to.

    Attributes:
        tpot: seconds per output token; None: most tokens per second.
        parking: host bytes for preempted requests; None: all that is free at the start.
    """

    tpot: float | None = None
    parking: int | None = None

    def __post_init__(self) -> None:
        """Refuse what nothing can hold."""
        if self.tpot is not None and not self.tpot > 0.0:
            raise UserError(f"the bound on seconds per token is {self.tpot}; it must be above 0")
        if self.parking is not None and self.parking < 0:
            raise UserError(f"parking memory is {self.parking} bytes; it must be 0 or more")


NO_LIMITS = Limits()


@dataclasses.dataclass
class Pace:
    """Holds time per output token under a bound.

    Attributes:
        rows: request rows of the engine.
        bound: seconds per output token; None: no bound.
        limit: requests that may be in rows.
        times: latest seconds per token, one for each request and dispatch.
    """

    rows: int
    bound: float | None = None
    limit: int = 0
    times: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))
    _step: float = 0.0
    _piece: float = 0.0
    _tokens: float = 1.0
    _wait: int = 0
    _quarantine: int = QUARANTINE

    def __post_init__(self) -> None:
        """Start with everything, or with one request and probe from there."""
        self.limit = self.rows if self.bound is None else 1

    @property
    def pieces(self) -> int | None:
        """Pieces of prefill that may come between two steps; None: all."""
        if self.bound is None:
            return None
        spare = self.bound * self._tokens - self._step
        return max(1, int(spare / self._piece)) if self._piece > 0.0 else 1

    def add_piece(self, seconds: float) -> None:
        """Take in the time of one piece of prefill."""
        self._piece = _average(self._piece, seconds)

    def add_step(self, gap: float, step: float, counts: list[int]) -> None:
        """Take in a dispatch, and adjust the limit.

        Args:
            gap: seconds since the dispatch before it ended, while requests were decoding.
            step: seconds of the dispatch alone.
            counts: tokens of every request that took part, 1 or more.
        """
        if self.bound is None or not counts:
            return
        self._step = _average(self._step, step)
        self._tokens = _average(self._tokens, sum(counts) / len(counts))
        self.times.extend(gap / count for count in counts)
        self._wait = max(0, self._wait - 1)
        if len(self.times) < LEAST:
            return
        tail = float(np.percentile(self.times, 95))
        if tail > self.bound and self.limit > 1:
            self._reduce(len(counts))
        elif tail < ROOM * self.bound and self._wait == 0 and len(counts) >= self.limit:
            self.limit = min(self.rows, self.limit + 1)
            self.times.clear()

    def _reduce(self, running: int) -> None:
        self.limit = max(1, min(self.limit, running) - 1)
        self._wait = self._quarantine
        self._quarantine = min(2 * self._quarantine, LONGEST_QUARANTINE)
        self.times.clear()


def _average(past: float, value: float) -> float:
    return value if past == 0.0 else DECAY * past + (1.0 - DECAY) * value
