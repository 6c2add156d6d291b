"""An engine under a bound on the time per token, whose device takes what a formula says."""

from collections import deque

import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Finished, NewTokens
from dhisparse_jax.engine.flight import Flight
from dhisparse_jax.engine.pace import Limits
from tests.support.jobs import assert_baseline
from tests.support.serving import CHUNK, POLICIES, config, model, request

ROWS = 8


class VirtualDevice:
    """Does one dispatch after another, each in its time; nothing else takes any.

    Attributes:
        now: the time at the host: when it last saw a dispatch end.
        free: when the device has done all that was launched.
    """

    def __init__(self, monkeypatch, served, seconds_of):
        self.now, self.free, self.ends = 0.0, 0.0, deque()
        launch, land = served.dispatch, Flight.land

        def timed_launch():
            self.free = max(self.now, self.free) + seconds_of(len(served._roster.decoding()))
            self.ends.append(self.free)
            return launch()

        def timed_land(flight):
            self.now = self.ends.popleft()
            return land(flight)

        monkeypatch.setattr(served, "now", lambda: self.now)
        monkeypatch.setattr(served, "dispatch", timed_launch)
        monkeypatch.setattr(Flight, "land", timed_land)


@pytest.mark.parametrize("bound, most", [(0.0401, 1), (0.0701, 4), (0.2, ROWS)])
def test_admits_as_many_as_hold_the_bound_but_one(monkeypatch, bound, most):
    """A step takes 30 ms and 10 ms a request."""
    limits = Limits(tpot=bound)
    served = Engine(*model(), config(*POLICIES["fixed"], requests=ROWS), chunk=CHUNK, limits=limits)
    device = VirtualDevice(monkeypatch, served, lambda rows: 0.03 + 0.01 * rows)
    for seed in range(4 + 4 * most):
        served.submit(request(8, 40 + 11 * (seed % 5), seed=seed))
    running, times, tokens = [], {}, []
    while not served.idle:
        for event in served.advance():
            match event:
                case NewTokens(number, _):
                    times.setdefault(number, []).append(device.now)
                case Finished(number, _):
                    tokens.extend(np.diff(times[number]).mean(keepdims=True))
        if served.counts[1]:  # while there is somebody to let in
            running.append(served.counts[0])
    assert max(running) == most
    assert np.median(running[len(running) // 2 :]) >= most - 1
    assert np.percentile(tokens, 95) <= bound
    assert_baseline(served)
