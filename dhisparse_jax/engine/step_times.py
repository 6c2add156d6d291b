"""Step times: seconds of a dispatch by how many requests take part, measured; what more would take.

The measured means are smoothed to the nearest times that never fall with more requests. Between
two measured numbers of requests the time is interpolated; above the largest it goes on as over the
upper half of what was measured. What was seen little is forgotten soon, and what was seen often
later: texts grow, and other texts select otherwise.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

LEAST = 8
"""Dispatches with a number of requests before its time is known."""

WINDOW = 64
"""Latest dispatches with a number of requests that its time is the mean of."""

FORGET = 32
"""Dispatches after which a number of requests is forgotten, for every one in which it was seen."""

REPORTED = 512
"""Latest dispatches of each kind that the percentiles of the table are of."""


class Known(NamedTuple):
    """Measured numbers of requests, ascending, and the seconds of a dispatch with each.

    Attributes:
        rows: numbers of requests.
        seconds: what a dispatch with each of them takes.
    """

    rows: Int[np.ndarray, " n"]
    seconds: Float[np.ndarray, " n"]

    def of(self, rows: Int[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """Seconds with these numbers of requests; at least one must be measured."""
        inside = np.interp(rows, self.rows, self.seconds)
        return inside + self._slope() * np.maximum(rows - self.rows[-1], 0)

    def _slope(self) -> float:
        """Seconds of one more; of a single measurement all may be in proportion."""
        if len(self.rows) == 1:
            return float(self.seconds[-1] / self.rows[-1])
        points = max(2, int((2 * self.rows >= self.rows[-1]).sum()))
        rows, seconds = self.rows[-points:], self.seconds[-points:]
        rows = rows - rows.mean()
        return float((rows * seconds).sum() / (rows * rows).sum())


class StepTimes:
    """What dispatches took of late, by requests and by verify length."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._mean: dict[int, float] = {}
        self._end: dict[int, int] = {}  # dispatch at which it is forgotten
        self._kinds: dict[tuple[int, int], deque[float]] = {}
        self._dispatches = 0

    def add(self, rows: int, verified: int, seconds: float) -> None:
        """Take in a dispatch.

        Args:
            rows: requests that took part.
            verified: queries per request that were verified, on average over requests.
            seconds: how long it took.
        """
        self._dispatches += 1
        latest = self._latest.setdefault(rows, deque(maxlen=WINDOW))
        latest.append(seconds)
        self._mean[rows] = sum(latest) / len(latest)
        self._end[rows] = self._dispatches + FORGET * len(latest)
        self._kinds.setdefault((rows, verified), deque(maxlen=REPORTED)).append(seconds)
        for old in [n for n, end in self._end.items() if end <= self._dispatches]:
            del self._latest[old], self._mean[old], self._end[old]

    def known(self) -> Known:
        """Numbers of requests that were seen often enough; maybe none."""
        rows = sorted(n for n, times in self._latest.items() if len(times) >= LEAST)
        seconds = never_falling((self._mean[n], len(self._latest[n])) for n in rows)
        return Known(np.asarray(rows, np.int64), np.asarray(seconds, np.float64))

    def table(self) -> list[dict[str, Any]]:
        """Percentiles of the seconds of a dispatch, by requests and verify length, in order."""
        table = []
        for (rows, verified), times in sorted(self._kinds.items()):
            middle, tail = np.percentile(np.asarray(times), (50, 95))
            table.append(
                {
                    "requests": rows,
                    "verified": verified,
                    "dispatches": len(times),
                    "p50_ms": 1e3 * float(middle),
                    "p95_ms": 1e3 * float(tail),
                }
            )
        return table


def never_falling(values: Iterable[tuple[float, int]]) -> list[float]:
    """The nearest sequence that never falls, by weighted least squares.

    Neighbours that fall are pooled to their mean: 1 3 2 4 with equal weights gives 1 2.5 2.5 4.

    Args:
        values: value and weight of each.
    """
    pools: list[tuple[float, int, int]] = []  # mean, weight, members
    for value, weight in values:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, light, few), (high, heavy, many) = pools.pop(), pools.pop()
            total = light + heavy
            pools.append(((low * light + high * heavy) / total, total, few + many))
    return [mean for mean, _, members in pools for _ in range(members)]
