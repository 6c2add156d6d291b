"""The trace model holds the published cache curve; the reference caches do what their names say."""

import numpy as np
import pytest

from bench.caches import POLICIES, lru, simulate
from bench.traces import (
    EXPECTED_UNIONS,
    GLM_5_1,
    PUBLISHED_MISSES,
    Locality,
    figures,
    trace,
    unions,
    verify_queries,
)


def test_curve_is_the_published_one():
    rows = figures(trace(k=256, history=49152, steps=900))
    assert len(rows) == len(PUBLISHED_MISSES) + len(EXPECTED_UNIONS)
    for row in rows:
        assert abs(row.deviation) < 0.1, row


def test_selections_are_distinct_seen_positions():
    sample = trace(k=32, history=2000, steps=50)
    assert sample.selection.dtype == np.int32
    for step, selected in enumerate(sample.selection):
        assert len(np.unique(selected)) == 32
        assert selected.min() >= 0
        assert selected.max() == selected[0] == 2000 + step


def test_seeds_are_reproducible_and_differ():
    draw = lambda seed: trace(k=32, history=2000, steps=5, seed=seed).selection
    np.testing.assert_array_equal(draw(3), draw(3))
    assert not np.array_equal(draw(3), draw(4))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5])
def test_locality_is_tunable(share):
    locality = GLM_5_1.with_misses(share)
    sample = trace(locality, k=128, history=12000, steps=200)
    for budget, published in [(1, 0.3), (2, 0.134)]:
        missed = simulate(sample.selection, lru, sample.stack[: budget * 128], 12000)
        measured = np.mean([len(each) for each in missed]) / 128
        assert measured == pytest.approx(share * published / 0.3, rel=0.05)


@pytest.mark.parametrize("share", [0.3, 0.142, 0.014])
def test_a_budget_misses_the_share_it_was_chosen_for(share):
    budget = GLM_5_1.budget(share, 128, 3000)
    sample = trace(k=128, history=3000, steps=200)
    missed = simulate(sample.selection, lru, sample.stack[:budget], 3000)
    measured = np.mean([len(each) for each in missed]) / 128
    assert measured == pytest.approx(share, rel=0.1)


def test_too_short_a_history_is_refused():
    with pytest.raises(ValueError, match="too short for K = 64"):
        trace(k=64, history=256, steps=1)


def test_too_dense_a_band_is_refused():
    with pytest.raises(ValueError, match="more positions of a band than there are"):
        trace(Locality((0.5, 4), (0.7, 0.2), 0.6), k=64, history=600, steps=1)


def test_verify_queries_are_consecutive_steps():
    selection = trace(k=16, history=900, steps=12).selection
    windows = verify_queries(selection, 4, advance=3)
    assert windows.shape == (3, 4, 16)
    np.testing.assert_array_equal(windows[2], selection[6:10])
    assert set(unions(windows)[1]) == set(selection[3:7].flat)


STEPS = [np.array(step) for step in ([0, 3], [1, 4], [0, 1], [3, 4], [1, 2])]


@pytest.mark.parametrize(
    ("policy", "fetched"),
    [
        ("lru", [[3], [], [], [3], [1, 2]]),  # 4 is made by step 1, so it is no fetch
        ("fifo", [[3], [], [0], [3], [1, 2]]),
        ("belady", [[3], [], [], [3], [2]]),
    ],
)
def test_caches_on_a_small_example(policy, fetched):
    missed = simulate(STEPS, POLICIES[policy], np.array([0, 1, 2]), history=4)
    assert [list(each) for each in missed] == fetched


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_evicts_what_the_step_selects(policy):
    sample = trace(k=32, history=2000, steps=30)
    missed = simulate(sample.selection, POLICIES[policy], sample.stack[:32], 2000)
    for before, now, fetched in zip(
        sample.selection, sample.selection[1:], missed[1:], strict=False
    ):
        assert set(fetched) == set(now[1:]) - set(before)  # all 32 slots hold the selection


def test_cache_smaller_than_a_selection_is_refused():
    with pytest.raises(ValueError, match="step 0 selects 2 of a cache of 1"):
        simulate(STEPS, lru, np.array([0]), history=4)
