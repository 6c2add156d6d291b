"""Pace: the number of requests under a bound on the time per token, on a machine by formula."""

import numpy as np
import pytest

from dhisparse_jax.engine.pace import Limits, Pace
from dhisparse_jax.errors import UserError

ROWS = 16


def served(pace, seconds_of, steps, counts=1, waiting=ROWS):
    """Steps of a machine that takes `seconds_of(running)`; limits, and times per token."""
    limits, times = [], []
    for step in range(steps):
        running = min(pace.limit, waiting)
        gap = seconds_of(running, step)
        pace.add_step(gap, gap, dict.fromkeys(range(running), counts))
        limits.append(pace.limit)
        times.extend([gap / counts] * running)
    return np.array(limits), np.array(times)


def test_no_bound_no_limit():
    pace = Pace(ROWS)
    assert pace.limit == ROWS
    assert pace.pieces is None
    limits, _ = served(pace, lambda running, _: 10.0 * running, 50)
    assert set(limits) == {ROWS}


@pytest.mark.parametrize("bound, most", [(0.05, 4), (0.1, 9), (1.0, ROWS)])
def test_finds_how_many_hold_the_bound(bound, most):
    """A step takes 10 ms a request: as many as fit, not far below, and p95 under the bound."""
    limits, times = served(Pace(ROWS, bound), lambda running, _: 0.01 * running, 2000)
    assert most - 1 <= np.median(limits[200:]) <= min(most + 1, ROWS)
    assert np.percentile(times, 95) <= bound


def test_reduces_at_once_when_the_machine_slows_down():
    slow_from = 1000
    slower = lambda running, step: (0.01 if step < slow_from else 0.03) * running
    limits, _ = served(Pace(ROWS, 0.1), slower, 3000)
    assert limits[slow_from - 1] >= 7
    assert limits[slow_from + 100] <= 4
    assert np.median(limits[2000:]) in (2, 3)


def test_does_not_oscillate():
    """Probing one too many is ever rarer: few changes in thousands of steps."""
    limits, _ = served(Pace(ROWS, 0.1), lambda running, _: 0.011 * running + 0.02, 5000)
    assert (np.diff(limits[500:]) != 0).sum() < 60


def test_several_tokens_a_step_allow_more():
    one, _ = served(Pace(ROWS, 0.05), lambda running, _: 0.01 * running, 1000)
    four, _ = served(Pace(ROWS, 0.05), lambda running, _: 0.01 * running, 1000, counts=4)
    assert np.median(four[300:]) > 2 * np.median(one[300:])


def test_a_bound_that_nothing_holds_leaves_one():
    limits, _ = served(Pace(ROWS, 0.001), lambda running, _: 0.01, 200)
    assert set(limits) == {1}


def test_one_long_gap_is_no_reason_to_run_fewer():
    """Others were prefilled in it: of thirty tokens one came late."""
    pace = Pace(ROWS, 0.1)
    limits, _ = served(pace, lambda running, step: 1.0 if step % 30 == 29 else 0.02, 600)
    assert limits[-1] >= 8
    assert (np.diff(limits) >= 0).all()


def test_the_slowest_request_counts():
    """Fifteen of sixteen get four tokens a step, one gets one: its time is what is held."""
    pace = Pace(ROWS, 0.1, limit=0)
    for _ in range(2000):
        counts = {number: 4 if number else 1 for number in range(pace.limit)}
        pace.add_step(0.01 * pace.limit, 0.01 * pace.limit, counts)
    assert pace.limit <= 10


def test_light_load_does_not_raise_the_limit():
    """Two requests say nothing about sixteen."""
    limits, _ = served(Pace(ROWS, 1.0), lambda running, _: 0.01 * running, 1000, waiting=2)
    assert limits.max() <= 3


def test_prefill_gets_what_keeps_the_bound():
    """10 ms a piece, 40 ms a step, 100 ms allowed: in the long run, five pieces a step at 90 ms."""
    pace, gap, pieces = Pace(ROWS, 0.1), 0.04, []
    assert pace.pieces == 1
    for _ in range(400):
        pace.add_piece(0.01)
        pace.add_step(gap, 0.04, {0: 1})
        pieces.append(pace.pieces)
        gap = 0.04 + 0.01 * pieces[-1]
    assert np.mean(pieces[200:]) == pytest.approx(5, abs=0.3)
    seconds, tokens = pace.seen[0]
    assert seconds / tokens < 0.1


def test_no_prefill_while_the_bound_is_exceeded():
    pace = Pace(ROWS, 0.1)
    pace.add_piece(0.01)
    pace.add_step(0.2, 0.04, {0: 1, 1: 1})
    assert pace.pieces == 0


@pytest.mark.parametrize("tpot", [0.0, -1.0, float("nan")])
def test_bounds_that_mean_nothing(tpot):
    with pytest.raises(UserError, match="seconds per token is"):
        Limits(tpot=tpot)
    with pytest.raises(UserError, match="parking memory is -1 bytes"):
        Limits(parking=-1)
