"""A load that goes up and down, kept by an engine."""

import pytest

from bench.crowd import Phase
from bench.served_step import Crowd, summary
from tests.support.jobs import assert_baseline
from tests.support.serving import POLICIES, engine, request

REQUESTS = [request(20, 30, seed=1), request(40, 25, seed=2), request(33, 28, seed=3)]
SCRIPT = (Phase("low", 1, 45), Phase("high", 2, 45), Phase("low again", 1, 45))


@pytest.mark.slow
def test_a_load_is_kept_and_texts_are_the_same_under_both_policies():
    crowds = {}
    for policy in ("fixed", "adaptive"):
        served = engine(*POLICIES[policy])
        crowds[policy] = Crowd(served)
        crowds[policy].run(SCRIPT, REQUESTS)
        assert_baseline(served)
    for crowd in crowds.values():
        loads = [max(step.requests for step in crowd.steps if step.phase == p.name) for p in SCRIPT]
        assert loads == [1, 2, 1]
        assert all(sum(step.phase == p.name for step in crowd.steps) >= p.steps for p in SCRIPT)
    found = summary(crowds)
    assert found["same_tokens"]
    shares = [found["fetched_share"][policy]["high"] for policy in crowds]
    assert all(0 < share < 1 for share in shares)
    # A text that differs is noticed.
    first = next(iter(crowds["fixed"].texts.values()))
    first[0] += 1
    assert not summary(crowds)["same_tokens"]
