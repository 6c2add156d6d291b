"""Replay of requests that arrive over time."""

import pytest

from dhisparse_jax.engine.events import Finished, NewTokens
from dhisparse_jax.engine.replay import Arrival, Arrived, Clock, replay, warm_up
from dhisparse_jax.errors import UserError
from tests.support.jobs import Heard, alone, assert_baseline
from tests.support.serving import CONTEXT, POLICIES, engine, request


class Time:
    """A machine whose every look at the clock takes 10 ms."""

    def __init__(self):
        self.seconds, self.slept = 5.0, 0.0

    def now(self):
        self.seconds += 0.01
        return self.seconds

    def sleep(self, seconds):
        self.slept += seconds
        self.seconds += seconds


REQUESTS = [request(20, 10, seed=1), request(30, 12, seed=2), request(9, 8, seed=3)]
ARRIVALS = [Arrival(1000.0, REQUESTS[2]), Arrival(0.0, REQUESTS[0]), Arrival(0.3, REQUESTS[1])]


@pytest.mark.parametrize("virtual", [pytest.param(False, marks=pytest.mark.slow), True])
def test_everybody_is_served_at_their_time(virtual):
    time, served, heard, arrived = Time(), engine(*POLICIES["adaptive"]), Heard(), []
    clock = Clock(virtual, time.now, time.sleep)
    for event in replay(served, ARRIVALS, clock):
        heard.add(event)
        if isinstance(event, Arrived):
            arrived.append(event.at)
            assert clock.now() >= event.at
    assert arrived == [0.0, 0.3, 1000.0]
    assert list(heard.tokens.values()) == [alone(item) for item in REQUESTS]
    assert (time.slept > 990) == (not virtual)
    assert clock.now() > 1000
    assert_baseline(served)


def test_stopping_cancels_what_is_left():
    served = engine(*POLICIES["adaptive"])
    stream = replay(served, ARRIVALS, Clock(True))
    for event in stream:
        if isinstance(event, NewTokens):
            break
    stream.close()
    assert served.counts == (0, 0)
    assert all(isinstance(event, Finished) for event in served.advance())
    assert_baseline(served)


def test_impossible_requests_are_refused():
    served = engine(*POLICIES["adaptive"])
    with pytest.raises(UserError, match=f"{CONTEXT} tokens, the context is {CONTEXT}"):
        list(replay(served, [Arrival(0.0, request(CONTEXT, 1))], Clock(True)))


def test_warm_up_compiles_everything():
    served = engine("fixed", 12)
    warm_up(served)
    traces = served.compiled.traces()
    list(replay(served, ARRIVALS, Clock(True)))
    assert served.compiled.traces() == traces
