"""Adaptive residency follows the load of real runs.

18 pages of 8 slots for 3 requests in 2 pools; the floor is 1 page.
"""

import dataclasses
from itertools import pairwise

import jax
import numpy as np
import pytest

from dhisparse_jax.engine.events import NewTokens, StepDone, StepMetrics
from tests.support.serving import engine, is_idle, request

HOT_ROWS = 24
PAGES, FLOOR = 18, 1
LONG = request(40, 50)  # fills up to 90 positions
SHORT = [request(90, 5, seed=1), request(85, 6, seed=2)]


@dataclasses.dataclass
class Step:
    """Budgets and load after a decode step; `joined`: somebody joined since the last one."""

    budget: np.ndarray  # [pools, rows]
    active: np.ndarray  # [rows]
    length: np.ndarray  # [rows]
    metrics: StepMetrics
    joined: bool


def trace(policy, requests):
    """The steps of a run, and the budgets right after every admission."""
    served = engine(policy, HOT_ROWS)
    steps, joins, joined = [], {}, False
    for event in served.run(requests):
        state = served.state
        if isinstance(event, NewTokens) and event.request not in joins:
            joins[event.request] = state.budget.tolist()
            joined = True
        if isinstance(event, StepDone):
            host = jax.device_get((state.budget, state.active, state.length))
            steps.append(Step(*host, metrics=event.metrics, joined=joined))
            joined = False
    assert is_idle(served)
    return steps, joins


@pytest.fixture(scope="module")
def adaptive():
    return trace("adaptive", [LONG, *SHORT])[0]


@pytest.fixture(scope="module")
def fixed():
    return trace("fixed", [LONG, *SHORT])[0]


def alone(steps):
    return [step for step in steps if step.active.sum() == 1]


def fetched_share(steps):
    selected = sum(step.metrics.selected_rows for step in steps)
    return sum(step.metrics.fetched_rows for step in steps) / selected


def test_newcomers_make_the_others_shrink():
    """The first request gets its whole history, then all are capped at one level that fits."""
    _, joins = trace("adaptive", [LONG, *SHORT])
    assert joins == {
        0: [[6, 0, 0], [6, 0, 0]],
        1: [[5, 4, 0], [5, 4, 0]],
        2: [[3, 3, 3], [3, 3, 3]],
    }


def test_grows_when_the_others_leave(adaptive):
    """Until it holds its whole history or all there is, as fast as it fills pages by misses."""
    steps = alone(adaptive)
    assert len(steps) > 30
    for step in steps[16:]:
        # A page is granted when there are records for it: up to two steps after the first of them.
        useful = -(-(step.length[0] - 1) // 8)
        full = step.budget.sum() == PAGES
        assert full or (step.budget[:, 0] >= useful - 1).all()


def test_fetches_less_than_fixed_with_the_same_memory(adaptive, fixed):
    assert adaptive[0].budget.sum() == fixed[0].budget.sum() == PAGES
    one, other = fetched_share(alone(adaptive)[8:]), fetched_share(alone(fixed)[8:])
    assert other > 0.2
    assert one < other / 4


def test_history_that_fits_is_never_fetched():
    """Alone with enough pages, a request is resident, and stays so while it grows."""
    steps, _ = trace("adaptive", [request(30, 24, seed=4)])
    assert sum(step.metrics.fetched_rows for step in steps) == 0
    assert steps[-1].budget[:, 0].tolist() == [7, 7]


def test_makes_room_for_newcomers_but_keeps_floors():
    """Rows fill up one after another; everybody always has the floor, and all fits."""
    requests = [request(80, 12, seed=n) for n in range(3)] + [request(20, n + 4) for n in range(6)]
    steps, _ = trace("adaptive", requests)
    for step in steps:
        assert (step.budget[:, step.active] >= FLOOR).all()
        assert (step.budget[:, ~step.active] == 0).all()
        assert step.budget.sum() <= PAGES


def test_moves_are_bounded(adaptive):
    """From step to step at most `moves_per_step` pages find a new holder."""
    gained = [
        np.maximum(after.budget - before.budget, 0).sum()
        for before, after in pairwise(adaptive)
        if not after.joined
    ]
    assert 0 < max(gained) <= engine("adaptive", HOT_ROWS).cfg.moves_per_step


def test_settles():
    """Under a constant load pages stop moving: residency does not thrash."""
    steps, _ = trace("adaptive", [request(60, 30, seed=n) for n in (5, 6, 7)])
    moved = [np.abs(b.budget - a.budget).sum() for a, b in pairwise(steps[15:])]
    assert np.mean(moved) < 0.5


def test_pages_come_back(adaptive):
    """`trace` ends with every page free; here, those of the first to leave are free at once."""
    left = next(step for step in adaptive if not step.active.all())
    assert (left.budget[:, ~left.active] == 0).all()
