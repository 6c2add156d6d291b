"""Pace: how many requests may run at once, and how much is prefilled between two steps.

Without a bound, as many as there are rows, and every prompt at once: most tokens per second. With a
bound on the time per output token, the number is probed: one more while the slowest running request
is well below the bound, fewer as soon as it exceeds it. Nobody is sent away for it, who would wait
longer still: fewer enter. No more is prefilled between two steps than leaves everybody below the
bound. What a verification costs and gives is the schedule's business: it maximises tokens per
second of the requests that run, which is to minimise their mean time per token.
"""

import dataclasses
from collections.abc import Mapping

from dhisparse_jax.errors import UserError

LEAST = 16
"""Dispatches after a change of the limit before it may change again."""

MEMORY = 0.97
"""Weight of the past, per dispatch, in a request's time per token: it is that of some 30 steps, as
one gap in which others were prefilled says little about a whole text."""

ROOM = 0.8
"""Share of the bound below which one more request is tried."""

FILL = 0.9
"""Share of the bound that prefill may bring a running request to."""

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
        seen: seconds and tokens of each running request of late, by its number.
    """

    rows: int
    bound: float | None = None
    limit: int = 0
    seen: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    _step: float = 0.0
    _piece: float = 0.0
    _tokens: float = 1.0
    _since: int = 0
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
        if self._piece == 0.0:
            return 1
        spare = [
            FILL * self.bound * (tokens + self._tokens) - seconds - self._step
            for seconds, tokens in self.seen.values()
        ]
        return max(0, int(min(spare, default=0.0) / self._piece))

    def add_piece(self, seconds: float) -> None:
        """Take in the time of one piece of prefill."""
        self._piece = _average(self._piece, seconds)

    def add_step(self, gap: float, step: float, counts: Mapping[int, int]) -> None:
        """Take in a dispatch, and adjust the limit.

        Args:
            gap: seconds since the dispatch before it ended, while requests were decoding.
            step: seconds of the dispatch alone.
            counts: tokens of every request that took part, 1 or more, by its number.
        """
        if self.bound is None or not counts:
            return
        self._step = _average(self._step, step)
        self._tokens = _average(self._tokens, sum(counts.values()) / len(counts))
        for number, count in counts.items():
            seconds, tokens = self.seen.get(number, (0.0, 0.0))
            self.seen[number] = (MEMORY * seconds + gap, MEMORY * tokens + count)
        self.seen = {number: self.seen[number] for number in counts}
        self._since, self._wait = self._since + 1, max(0, self._wait - 1)
        if self._since >= LEAST:
            self._adjust(len(counts), self.bound)

    def _adjust(self, running: int, bound: float) -> None:
        slowest = max(seconds / tokens for seconds, tokens in self.seen.values())
        if slowest > bound and self.limit > 1:
            self._set(max(1, min(self.limit, running) - 1))
            self._wait = self._quarantine
            self._quarantine = min(2 * self._quarantine, LONGEST_QUARANTINE)
        elif slowest < ROOM * bound and self._wait == 0 and running >= self.limit < self.rows:
            self._set(self.limit + 1)

    def _set(self, limit: int) -> None:
        """Another limit makes another load: what was seen before says nothing about it."""
        self.limit, self._since = limit, 0
        self.seen.clear()


def _average(past: float, value: float) -> float:
    return value if past == 0.0 else DECAY * past + (1.0 - DECAY) * value
