"""The verify length follows confidence, history and fetches; tokens stay the same (greedy)."""

from functools import cache

import jax
import numpy as np
import pytest

from dhisparse_jax.engine.meter import Meter
from dhisparse_jax.speculation.schedule import Rule, init_load
from tests.support.serving import POLICIES, drafted, engine, request, run
from tests.support.toy_draft import FixedMeter, toy_draft, with_errs

SIZES = [(5, 30), (40, 25), (70, 20), (2, 40)]
REQUESTS = [request(*sizes, seed=seed) for seed, sizes in enumerate(SIZES)]
RULES = [Rule.EARLY_STOP, Rule.STALE, Rule.HISTORY]
CHEAP, DEAR = 1e-9, 1e-2
"""Seconds per byte: a record of 128 bytes costs nothing, or more than a step of a second."""


@cache
def plain():
    return run(engine("resident", 1), REQUESTS)


@cache
def served(rule):
    texts = [[*asked.prompt, *plain().tokens[n]] for n, asked in enumerate(REQUESTS)]
    return drafted(*POLICIES["fixed"], toy_draft(texts, length=3), rule=rule)


def measured(rule, byte_seconds, errs=5):
    engine_ = with_errs(served(rule), errs)
    engine_.meter = FixedMeter(engine_.cfg, byte_seconds)
    # As at the start: what a run learned must not depend on the tests before.
    engine_.load = jax.device_put(init_load(engine_.cfg.requests, 3), jax.devices()[0])
    return run(engine_, REQUESTS)


@pytest.mark.parametrize("byte_seconds", [CHEAP, DEAR])
@pytest.mark.parametrize("rule", RULES)
def test_same_tokens_for_every_rule(rule, byte_seconds):
    result = measured(rule, byte_seconds)
    assert result.tokens == plain().tokens
    assert result.finished == plain().finished


def verified(result):
    """Mean number of verified proposals per block."""
    return sum(result.acceptance.verified) / result.acceptance.blocks


@pytest.mark.parametrize("rule", RULES)
def test_dear_fetches_shorten_the_verification(rule):
    cheap, dear = measured(rule, CHEAP), measured(rule, DEAR)
    assert verified(dear) < verified(cheap)
    assert dear.total.fetched_rows / dear.total.selected_rows > 0
    per_step = lambda result: result.total.fetched_rows / result.acceptance.blocks
    assert per_step(dear) < per_step(cheap)


def test_history_gives_up_on_a_useless_draft():
    """And verifies nearly everything of one that is always right; the requests are short."""
    useless, right = measured(Rule.HISTORY, 1e-3, 16), measured(Rule.HISTORY, 1e-3, 0)
    assert verified(useless) < 0.7 * verified(right)


def test_confidence_spares_what_will_be_rejected():
    """The toy draft knows where it errs, so that fewer verified proposals are rejected."""
    every, stale = measured(Rule.STALE, CHEAP), measured(Rule.STALE, 1e-4)
    rejected = lambda result: (
        verified(result) - sum(result.acceptance.accepted) / (result.acceptance.blocks)
    )
    assert rejected(stale) < 0.8 * rejected(every)
    assert stale.acceptance.length > 0.8 * every.acceptance.length


def test_meter_measures_the_link_and_the_step():
    engine_ = served(Rule.HISTORY)
    meter = Meter(engine_.cfg, engine_.state)
    byte = float(meter.profile.byte_seconds)
    assert 0 < byte < 1e-3
    assert (np.asarray(meter.profile.step_seconds) == 1.0).all()
    engine_.meter = meter
    run(engine_, REQUESTS[:2])
    step = np.asarray(meter.profile.step_seconds)
    assert len(set(step.tolist())) == 1
    assert 0 < step[0] < 1.0
    assert len(step) == engine_.cfg.requests * engine_.cfg.queries + 1


def test_nothing_is_measured_where_nothing_depends_on_it():
    meter = Meter(served(Rule.HISTORY).cfg)
    assert float(meter.profile.byte_seconds) == 0.0
