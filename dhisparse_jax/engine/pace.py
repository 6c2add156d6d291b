"""Pace: how many requests may run at once, and how much is prefilled between two steps.

Without a bound, as many as there are rows, and every prompt at once: most tokens per second. With a
bound on the time per output token, as many as hold it by the measured times of a step; where nobody
knows about one more, it is tried while there is ample room. Nobody is sent away for the bound, who
would wait longer still: fewer enter. No more is prefilled between two steps than leaves the running
requests below the bound. What a verification costs and gives is the schedule's business: it
maximises tokens per second of the requests that run, so it minimises their mean time per token.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np

from dhisparse_jax.engine.step_times import Known, StepTimes
from dhisparse_jax.errors import UserError

SLOW = 0.05
"""Share of the running requests that may be slower than the bound: it is held at p95."""

PRIOR = 8.0
"""Dispatches that the mean of all counts for in the tokens per dispatch of one request: a new one
is expected to be like the others."""

GROWTH = 4
"""The limit goes beyond the most that were measured by one in so many at a time, and, but for a
single one, not beyond what holds if the time is all in proportion."""

PROBE = 64
"""Dispatches at the limit before one more is tried that is predicted not to hold; doubled by every
trial that fails."""

LONGEST_PROBE = 2**14
"""Most dispatches between two such trials."""

ROOM = 0.9
"""Share of the bound below which that is done."""

MEMORY = 0.97
"""Weight of the past, per dispatch, in a request's time per token: it is that of some 30 steps, as
one gap in which others were prefilled says little about a whole text."""

FILL = 0.97
"""Share of the bound that prefill may bring a running request to."""

PIECES = 9
"""Latest pieces of prefill that the time of the next is the median of."""

DECAY = 0.8
"""Weight of the past in the moving averages of a step."""

_LEAST_SECONDS = 1e-12


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine is held to.

    Attributes:
        tpot: seconds per output token; None: most tokens per second.
        parking: host bytes that preempted requests may take outside of their host pages; None: all
            that is free at the start.
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
"""As many requests as there are rows, and memory."""


@dataclasses.dataclass
class Seen:
    """What a running request got.

    Attributes:
        seconds: that passed of late, a dispatch counting less the older it is.
        tokens: that it got of late, likewise.
        every: tokens since it began to decode.
        dispatches: since then.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    every: int = 0
    dispatches: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        """One more dispatch."""
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens = MEMORY * self.tokens + tokens
        self.every += tokens
        self.dispatches += 1


class Pace:
    """Holds time per output token under a bound.

    Args:
        rows: request rows of the engine.
        bound: seconds per output token; None: no bound.

    Attributes:
        limit: requests that may be in rows.
        times: measured times of a dispatch.
    """

    def __init__(self, rows: int, bound: float | None = None) -> None:
        self._rows, self._bound = rows, bound
        self.limit = rows if bound is None else 1
        self.times = StepTimes()
        self._seen: dict[int, Seen] = {}
        self._pieces: deque[float] = deque(maxlen=PIECES)
        self._step = self._pauses = 0.0
        self._tokens = 1.0  # of a request in a dispatch, mean
        self._at_limit, self._trial, self._patience = 0, 0, PROBE

    @property
    def pieces(self) -> int | None:
        """Pieces of prefill that may come between two steps; None: all."""
        if self._bound is None:
            return None
        if not self._pieces:
            return 1
        allowed = FILL * self._bound
        spare = [
            allowed * (seen.tokens + self._tokens) - seen.seconds - self._step
            for seen in self._seen.values()
        ]
        piece = max(median(self._pieces), _LEAST_SECONDS)
        return max(0, int(_slow(spare) / piece)) if spare else 0

    def add_pause(self, seconds: float, piece: bool) -> None:
        """Take in time between two steps: of a piece of prefill, or of a request that came back."""
        self._pauses += seconds
        if piece:
            self._pieces.append(seconds)

    def add_dispatch(self, gap: float, counts: Mapping[int, int], verified: int) -> None:
        """Take in a dispatch, and set the limit anew.

        Args:
            gap: seconds since the dispatch before it ended, prefill between them included.
            counts: tokens of every request that took part, 1 or more, by its number; one at least.
            verified: queries per request that were verified, on average.
        """
        step = max(gap - self._pauses, 0.0)
        self._pauses = 0.0
        self.times.add(len(counts), verified, step)
        if self._bound is None:
            return
        self._step = _average(self._step, step)
        self._tokens = _average(self._tokens, sum(counts.values()) / len(counts))
        self._seen = {number: self._seen.get(number) or Seen() for number in counts}
        for number, count in counts.items():
            self._seen[number].add(gap, count)
        self._at_limit = self._at_limit + 1 if len(counts) >= self.limit else 0
        known = self.times.known()
        if len(known.rows):
            self._adjust(known, self._bound * self._slow_tokens())

    def _slow_tokens(self) -> float:
        """Tokens per dispatch of a slow request."""
        prior = PRIOR * self._tokens
        return _slow(
            [(seen.every + prior) / (seen.dispatches + PRIOR) for seen in self._seen.values()]
        )

    def _adjust(self, known: Known, allowed: float) -> None:
        """Set the limit; a dispatch may take `allowed` seconds."""
        top = int(known.rows[-1])
        certain = int(top * allowed / max(float(known.seconds[-1]), _LEAST_SECONDS)) - top
        most = min(self._rows, top + max(1, min(top // GROWTH, certain)))
        seconds = known.of(np.arange(1, most + 1))
        limit = max(1, int((seconds <= allowed).sum()))
        ample = bool(seconds[limit - 1] <= ROOM * allowed)
        limit = max(limit, self._try_more(known, limit, ample))
        if limit != self.limit:
            self.limit, self._at_limit = limit, 0

    def _try_more(self, known: Known, limit: int, ample: bool) -> int:
        """One more than `limit` while it is tried what that takes; else 0.

        Prediction says that it does not hold, which may be wrong where nothing was measured.

        Args:
            known: what was measured.
            limit: requests that are predicted to hold the bound.
            ample: they hold it with room to spare.
        """
        more = limit + 1
        if self._trial and self._trial in known.rows:  # it has been measured
            failed = self._trial > limit
            self._patience = min(2 * self._patience, LONGEST_PROBE) if failed else PROBE
            self._trial = 0
        if more > self._rows or more in known.rows or not ample:
            self._trial = 0
        elif self.limit == limit and self._at_limit >= self._patience:
            self._trial = more
        return self._trial


def _slow(values: list[float]) -> float:
    """The lowest value but for a share of `SLOW`; of twenty and less, the lowest."""
    return sorted(values)[int(SLOW * (len(values) - 1))]


def _average(past: float, value: float) -> float:
    return value if past == 0.0 else DECAY * past + (1.0 - DECAY) * value
