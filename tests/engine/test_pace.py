"""Pace: under a bound on the time per token, as many requests as hold it; on a machine by formula.

The machine has a queue without end. A step takes what a formula says of the number of requests that
decode, a piece of prefill what it takes, and nothing else takes any time.
"""

import math

import numpy as np
import pytest

from dhisparse_jax.engine.pace import Limits, Pace
from dhisparse_jax.errors import UserError

ROWS = 32


class VirtualMachine:
    """Serves requests at a pace, in virtual time.

    Args:
        pace: says how many enter, and how much is prefilled between two steps.
        seconds_of: seconds of a step, by the number of requests and the number of the step.
        tokens_of: tokens that a request gets in a step, by its number.
        length: tokens of a request.
        pieces: of prefill, a request; the seconds of each.
    """

    def __init__(self, pace, seconds_of, tokens_of=lambda _: 1, length=200, pieces=(0, 0.0)):
        self.pace, self.seconds_of, self.tokens_of = pace, seconds_of, tokens_of
        self.length, (self.pieces, self.piece_seconds) = length, pieces
        self.now, self.steps, self.entered = 0.0, 0, 0
        self.prefill = None  # number, pieces left
        self.running = {}  # number: tokens, time of the first
        self.limits, self.rows, self.times = [], [], []

    def run(self, steps):
        last = self.now
        for _ in range(steps):
            self.enter()
            if not self.running:
                continue
            self.now += self.seconds_of(len(self.running), self.steps)
            self.steps += 1
            counts = {number: self.tokens_of(number) for number in self.running}
            self.pace.add_dispatch(self.now - last, counts, 1)
            last = self.now
            self.limits.append(self.pace.limit)
            self.rows.append(len(self.running))
            self.take(counts)
        return self

    def enter(self):
        done = 0
        while self.prefill or len(self.running) < min(self.pace.limit, ROWS):
            most = self.pace.pieces
            if most is not None and done >= most and self.running and self.pieces:
                return
            self.prefill = self.prefill or [self.entered, self.pieces]
            self.entered += self.prefill[0] == self.entered
            if self.prefill[1]:
                self.now += self.piece_seconds
                self.pace.add_pause(self.piece_seconds, True)
                self.prefill[1] -= 1
                done += 1
            if not self.prefill[1]:
                # Those that start together do not end together.
                length = self.length - 7 * (self.prefill[0] % 20)
                self.running[self.prefill[0]] = [length, 1, self.now]
                self.prefill = None

    def take(self, counts):
        for number, count in counts.items():
            request = self.running[number]
            request[1] += count
            if request[1] >= request[0]:
                self.times.append((self.now - request[2]) / (request[1] - 1))
                del self.running[number]

    def settled(self, values):
        """What was seen after the first quarter."""
        return np.asarray(values[len(values) // 4 :])


def largest(seconds_of, allowed):
    """Most requests with which a step takes no longer than allowed."""
    return max((n for n in range(1, ROWS + 1) if seconds_of(n, 0) <= allowed), default=1)


MACHINES = {
    "in proportion": lambda n, _: 0.01 * n,
    "with a base": lambda n, _: 0.05 + 0.004 * n,
    "mostly base": lambda n, _: 0.05 + 0.0005 * n,
    "flat": lambda n, _: 0.05,
    "ever dearer": lambda n, _: 0.02 + 0.0003 * n * n,
    "ever cheaper": lambda n, _: 0.025 * math.sqrt(n),
    "in stairs": lambda n, _: 0.02 * math.ceil(n / 8) + 0.0001 * n,
    "one jump": lambda n, _: 0.005 if n == 1 else 0.05,
}
BOUNDS = [0.0601, 0.1505]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_runs_as_many_as_hold_the_bound_but_one(machine, bound):
    """And the times per token of 95 of 100 requests are below it."""
    seconds_of = MACHINES[machine]
    most = largest(seconds_of, bound)
    served = VirtualMachine(Pace(ROWS, bound), seconds_of).run(2000)
    rows = served.settled(served.rows)
    assert most - 1 <= np.median(rows) <= most
    assert np.percentile(served.settled(served.times), 95) <= bound


@pytest.mark.parametrize("machine", ["with a base", "mostly base", "ever dearer"])
def test_times_that_vary(machine):
    """By a tenth, and every fiftieth step takes twice as long."""
    rng = np.random.default_rng(0)
    mean_of = lambda n, _: 1.02 * MACHINES[machine](n, 0)
    varied = lambda n, step: (
        MACHINES[machine](n, 0) * (rng.normal(1.0, 0.1) + 1.0 * (step % 50 == 49))
    )
    for bound in BOUNDS:
        served = VirtualMachine(Pace(ROWS, bound), varied).run(2000)
        rows = np.median(served.settled(served.rows))
        assert largest(mean_of, 0.96 * bound) - 1 <= rows <= largest(mean_of, 1.02 * bound)
        assert np.percentile(served.settled(served.times), 95) <= 1.03 * bound


def test_prefill_takes_its_part_of_the_bound():
    """Twenty pieces a prompt, each a tenth of a step: what they take counts for those that run."""
    bound, seconds_of = 0.1, MACHINES["with a base"]
    served = VirtualMachine(Pace(ROWS, bound), seconds_of, pieces=(20, 0.005)).run(6000)
    assert np.percentile(served.settled(served.times), 95) <= bound
    # A request costs its pieces once in its life of some 130 tokens.
    held = lambda n: seconds_of(n, 0) + n * 20 * 0.005 / 130 <= bound
    most = max(n for n in range(1, ROWS + 1) if held(n))
    assert most - 1 <= np.median(served.settled(served.rows)) <= largest(seconds_of, bound)


def test_several_tokens_a_step_allow_more():
    four = VirtualMachine(
        Pace(ROWS, 0.0301), MACHINES["with a base"], lambda _: 4, length=1000
    ).run(2000)
    most = largest(MACHINES["with a base"], 4 * 0.0301)
    assert most - 1 <= np.median(four.settled(four.rows)) <= most


def test_slow_requests_count():
    """One in four gets one token a step, the others four: the time of the one is what is held."""
    served = VirtualMachine(
        Pace(ROWS, 0.101), MACHINES["in proportion"], lambda n: 4 if n % 4 else 1, length=500
    ).run(6000)
    assert np.percentile(served.settled(served.times), 95) <= 1.05 * 0.101
    assert 9 <= np.median(served.settled(served.rows)) <= 12


def test_no_bound_no_limit():
    pace = Pace(ROWS)
    assert pace.pieces is None
    served = VirtualMachine(pace, MACHINES["in proportion"]).run(50)
    assert set(served.limits) == {ROWS}
    assert set(served.rows) == {ROWS}


def test_fewer_enter_when_the_machine_slows_down():
    """Nobody is sent away: the number falls as requests end. And more when it is fast again."""
    slow = range(1500, 4500)
    changing = lambda n, step: (0.03 if step in slow else 0.01) * n
    served = VirtualMachine(Pace(ROWS, 0.101), changing).run(8000)
    assert served.limits[1400] in (9, 10)
    assert np.median(served.rows[3000:4500]) in (2, 3)
    assert np.median(served.rows[7000:]) in (9, 10)


def test_a_bound_that_nothing_holds_leaves_one():
    served = VirtualMachine(Pace(ROWS, 0.001), MACHINES["with a base"]).run(700)
    assert set(served.limits) == {1}


def test_one_long_gap_is_no_reason_to_run_fewer():
    """Others were prefilled in it: a step takes what it took before."""
    pace = Pace(ROWS, 0.1)
    for step in range(900):
        running = dict.fromkeys(range(pace.limit), 1)
        if step % 30 == 29:
            pace.add_pause(1.0, True)
        pace.add_dispatch(0.02 + (step % 30 == 29), running, 1)
    assert pace.limit == ROWS


def test_light_load_says_little_about_a_heavy_one():
    """Two requests: no more than three may come at once."""
    pace = Pace(ROWS, 1.0)
    for _ in range(500):
        pace.add_dispatch(0.02, dict.fromkeys(range(min(2, pace.limit)), 1), 1)
    assert pace.limit == 3


def test_prefill_gets_what_keeps_the_bound():
    """10 ms a piece, 40 ms a step, 100 ms allowed: in the long run, some 57 ms of pieces a step."""
    pace, gap, pieces = Pace(ROWS, 0.1), 0.04, []
    assert pace.pieces == 1
    for _ in range(400):
        pace.add_dispatch(gap, {0: 1}, 1)
        pieces.append(pace.pieces)
        for _ in range(pieces[-1]):
            pace.add_pause(0.01, True)
        gap = 0.04 + 0.01 * pieces[-1]
    assert np.mean(pieces[200:]) == pytest.approx(5.7, abs=0.2)


def test_no_prefill_while_the_bound_is_exceeded():
    pace = Pace(ROWS, 0.1)
    pace.add_pause(0.01, True)
    pace.add_dispatch(0.2, {0: 1, 1: 1}, 1)
    assert pace.pieces == 0


def test_table_of_times():
    pace = Pace(ROWS)
    for seconds, requests, verified in ((0.2, 2, 1), (0.1, 1, 4), (0.3, 2, 1)):
        pace.add_dispatch(seconds, dict.fromkeys(range(requests), 1), verified)
    assert pace.times.table() == [
        {"requests": 1, "verified": 4, "dispatches": 1, "p50_ms": 100.0, "p95_ms": 100.0},
        {
            "requests": 2,
            "verified": 1,
            "dispatches": 2,
            "p50_ms": pytest.approx(250.0),
            "p95_ms": pytest.approx(295.0),
        },
    ]


@pytest.mark.parametrize("tpot", [0.0, -1.0, float("nan")])
def test_bounds_that_mean_nothing(tpot):
    with pytest.raises(UserError, match="seconds per token is"):
        Limits(tpot=tpot)
    with pytest.raises(UserError, match="parking memory is -1 bytes"):
        Limits(parking=-1)
