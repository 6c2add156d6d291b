"""The simulator is the library's bookkeeping; the controller's promises on traces, in small."""

import numpy as np
import pytest

from bench.caches import lru, simulate
from bench.crowd import LIFE, Crowd, Phase, Run
from bench.load_step import PHASES, settle_steps
from bench.script import script
from bench.simulator import Simulator, StepRecord, geometry, programs
from bench.traces import GLM_5_1, trace
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.hierarchy.invariants import check_invariants

K, HISTORY, STEPS, ROWS, MOVES = 64, 5000, 200, 4, 8
CALM, RESTLESS = 0, 1
"""Traces that select anew a quarter, and 1.75 times, of the published share."""


@pytest.fixture(scope="module")
def play():
    kinds = [GLM_5_1.with_misses(0.3 * factor) for factor in (0.25, 1.75)]
    sizes = {"k": K, "history": HISTORY, "steps": STEPS}
    return script([trace(kind, seed=seed, **sizes) for seed, kind in enumerate(kinds)])


def config(policy, rows, hot_rows, **sizes):
    return HierarchyConfig(
        geometry=geometry(K),
        policy=policy,
        requests=rows,
        capacity=HISTORY + STEPS,
        hot_rows=hot_rows,
        **{"moves_per_step": MOVES, **sizes},
    )


def adaptive(play):
    """Memory for 4 requests of 2 K, in 8 rows with a floor of K."""
    return Simulator(config(Policy.ADAPTIVE, 2 * ROWS, K), play)


def even(play):
    """As much memory, dealt evenly to 4 requests."""
    return Simulator(config(Policy.FIXED, ROWS, 2 * K), play)


def share(record, first=0):
    return record.fetched[first:].sum() / record.selected[first:].sum()


def sound(sim):
    return [name for name, holds in check_invariants(sim.state, sim.cfg).items() if not holds]


def test_fetches_what_an_exact_lru_cache_does(play):
    sim = even(play)
    for kind in (CALM, RESTLESS):
        sim.join(kind)
    record = sim.run(STEPS - 1)
    for row, kind in enumerate((CALM, RESTLESS)):
        # The script names the positions so that the last ones are on top of the stack.
        stack = np.arange(HISTORY)[::-1]
        steps = list(play.windows[kind, : STEPS - 1, 0])
        missed = np.mean([len(each) for each in simulate(steps, lru, stack[: 2 * K], HISTORY)])
        assert record.fetched[:, 0, row].mean() == pytest.approx(missed, rel=0.06)


def test_rows_and_columns_that_are_left_out_change_nothing(play):
    """Two requests in the first rows, and in rows of which the first are empty again."""
    records = []
    for skipped in (0, 2):
        sim = even(play)
        for kind in [CALM] * skipped + [CALM, RESTLESS]:
            sim.join(kind)
        for row in range(skipped):
            sim.leave(row)
        records.append(sim.run(12))
    here, there = (record.fetched[:, 0, record.active[0]] for record in records)
    np.testing.assert_array_equal(here, there)


@pytest.mark.slow
def test_measured_benefit_beats_even_sharing(play):
    """As many requests as there is memory for at 2 K each, half of them restless."""
    records = []
    for sim in (even(play), adaptive(play)):
        for row in range(ROWS):
            sim.join((CALM, RESTLESS)[row % 2])
        records.append(sim.run(150))
    evenly, measured = (share(record, 50) for record in records)
    assert 0.12 < evenly < 0.16
    assert measured < 0.93 * evenly
    held = records[1].held[-1, 0]
    assert held[1] > held[0]
    assert sound(sim) == []


@pytest.mark.slow
def test_pools_with_more_traffic_get_more_pages(play):
    """Two requests, each with a calm and a restless pool in one hot pool, at 2 K per pool."""
    two = {"geometry": geometry(K, 2), "requests": 2, "capacity": HISTORY + STEPS}
    records = {}
    for policy in (Policy.FIXED, Policy.ADAPTIVE):
        cfg = HierarchyConfig(policy=policy, hot_rows=2 * K, moves_per_step=MOVES, **two)
        sim = Simulator(cfg, play)
        for _ in range(2):
            sim.join((CALM, RESTLESS))
        records[policy] = sim.run(150)
    evenly, measured = records[Policy.FIXED], records[Policy.ADAPTIVE]
    assert share(measured, 50) < 0.95 * share(evenly, 50)
    assert (evenly.held[-1] == sim.cfg.share_pages(0)).all()
    calm, restless = measured.held[-1]
    assert (restless > 1.2 * calm).all()
    assert sound(sim) == []


@pytest.mark.slow
def test_newcomers_have_their_pages_at_once_and_nobody_less_than_the_floor(play):
    """Memory is exhausted step by step; at every admission somebody has to release pages."""
    sim = adaptive(play)
    for row in range(2 * ROWS):
        assert sim.join(row % 2) == row
        assert (sim.budget[0, : row + 1] >= sim.cfg.floor_pages(0)).all()
        assert sim.budget.sum() <= sim.cfg.requests * sim.cfg.share_pages(0)
        record = sim.run(2)
        assert (record.held[:, 0, : row + 1] >= sim.cfg.floor_pages(0)).all()
    assert sound(sim) == []
    assert set(sim.budget[0]) == {sim.cfg.floor_pages(0)}


@pytest.mark.parametrize("moves", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_oscillating_load_moves_no_more_than_the_bound(play, moves):
    """The load changes every 10 steps; what moves per token is bounded, and does not add up."""
    sim = Simulator(config(Policy.ADAPTIVE, 2 * ROWS, K, moves_per_step=moves), play)
    phases = [Phase("swing", ROWS // 2 * (1 + number % 2), 10) for number in range(8)]
    run = Crowd(sim).run(tuple(phases))
    assert run.moves_per_token().max() <= moves
    assert run.moved().max() == moves
    assert run.release_steps == [0] * len(run.admissions)
    assert sound(sim) == []
    # With what admissions take, at most an even share of the pages each, over whole periods.
    even = sim.cfg.requests * sim.cfg.share_pages(0) / (ROWS // 2 + 1)
    joined = sum(step >= 20 for step, _ in run.admissions)
    assert joined > 0
    assert all(pages <= even for step, pages in run.admissions if step >= 20)
    tokens = run.record.emitted[20:].sum()
    most = moves + joined * even / tokens
    assert run.all_moves_per_token(20)[1:].mean() <= most


def test_settles_under_a_constant_load(play):
    """Once pages are where they save most they stay there."""
    sim = adaptive(play)
    for row in range(ROWS):
        sim.join((CALM, RESTLESS)[row % 2])
    moved = sim.run(160).moved
    assert moved[:10].sum() > MOVES / 2
    assert moved[100:].mean() < 0.5


@pytest.mark.slow
def test_grows_again_when_the_load_falls(play):
    sim = adaptive(play)
    for row in range(2 * ROWS):
        sim.join(row % 2)
    crowded = share(sim.run(10))
    for row in range(1, 2 * ROWS):
        sim.leave(row)
    alone = sim.run(60)
    assert crowded > 0.25
    assert share(alone, 40) < 0.2 * crowded
    budget = sim.budget[0, 0]
    assert sim.cfg.floor_pages(0) + MOVES < budget
    grown = np.diff(alone.held[:, 0, 0])
    assert grown.max() <= MOVES


def test_nothing_is_traced_again(play):
    """Loads and budgets are data: a second visit of the same loads compiles nothing."""
    sim = adaptive(play)

    def visit():
        for row in range(2 * ROWS):
            sim.join(row % 2)
        sim.run(10)
        for row in range(2 * ROWS):
            sim.leave(row)

    visit()
    once = programs(sim.cfg).traces()
    visit()
    assert programs(sim.cfg).traces() == once >= 4


def run_of(shares):
    """A run with these fetched shares."""
    steps = len(shares)
    one, cell = np.ones((steps, 1), np.int64), np.ones((steps, 1, 1), np.int64)
    none = np.zeros(steps, np.int64)
    record = StepRecord(
        active=one > 0,
        emitted=one,
        selected=1000 * cell,
        fetched=np.round(1000 * np.reshape(shares, cell.shape)).astype(np.int64),
        held=cell,
        moved=none,
        taken=none,
    )
    return Run(record, [], [])


@pytest.mark.parametrize("late", [0, 10, 130, 299])
def test_settle_steps(late):
    before = sum(phase.steps for phase in PHASES[:-1])
    after = PHASES[-1].steps
    shares = [0.5] * before + [0.2] * late + [0.01] * (after - late)
    assert settle_steps(run_of(shares)) == -(-late // 10) * 10


def test_requests_end_and_are_replaced(play):
    sim = even(play)
    crowd = Crowd(sim)
    run = crowd.run((Phase("some", 3, 60),))
    assert (run.record.active.sum(axis=1) == 3).all()
    assert len(run.admissions) >= 3
    assert LIFE < STEPS
