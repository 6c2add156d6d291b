"""Thousands of speculative steps: requests join, leave and are abandoned at random.

DHISPARSE_STEPS sets how many; 20,000 take some minutes.
"""

import itertools
import os
from functools import cache

import numpy as np
import pytest

from dhisparse_jax.engine.events import Acceptance, NewTokens, StepDone
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.speculation.schedule import Rule
from tests.support.serving import CONTEXT, POLICIES, drafted, engine, is_idle, request, run
from tests.support.toy_draft import FixedMeter, toy_draft

pytestmark = pytest.mark.slow


STEPS = int(os.environ.get("DHISPARSE_STEPS", "1500"))
PROMPTS = [(n, CONTEXT - n) for n in (1, 3, 9, 16, 17, 31, 40, 55, 70, 88)]
EVENTS_AT_ONCE = 400


@cache
def texts():
    """The text of every prompt, as long as the context allows."""
    asked = [request(*sizes, seed=seed) for seed, sizes in enumerate(PROMPTS)]
    tokens = run(engine("resident", 1), asked).tokens
    return [[*item.prompt, *tokens[number]] for number, item in enumerate(asked)]


def batches(rng):
    """Batches of requests without end: random prompts and lengths, some with a stop token.

    Each is the numbers of the prompts, and the requests.
    """
    while True:
        numbers = rng.integers(0, len(PROMPTS), 12)
        yield numbers, [random_request(rng, number) for number in numbers]


def random_request(rng, number):
    prompt, most = PROMPTS[number]
    stop = (int(rng.integers(0, 61)),) if rng.random() < 0.3 else ()
    new = int(rng.integers(1, min(most, 40) + 1))
    return request(prompt, new, seed=int(number), stop=stop)


def test_invariants_and_acceptance_hold_for_long():
    """The state stays sound, texts stay right, and the draft stays as good as it was."""
    served = drafted(*POLICIES["adaptive"], toy_draft(texts(), length=3), rule=Rule.STALE)
    served.meter = FixedMeter(served.cfg, 1e-4)
    rng = np.random.default_rng(2)
    history, steps = [], 0
    for numbers, asked in batches(rng):
        tokens = [[] for _ in asked]
        abandoned = int(rng.integers(5, EVENTS_AT_ONCE)) if rng.random() < 0.3 else None
        for event in itertools.islice(served.run(asked), abandoned):
            match event:
                case NewTokens(number, new):
                    tokens[number].extend(new)
                case StepDone(_, _, acceptance):
                    steps += 1
                    history.append(acceptance)
                    report = check_invariants(served.state, served.cfg)
                    assert all(report.values()), (steps, report)
                    assert draft_is_committed(served)
        assert is_idle(served)
        for number, item, found in zip(numbers, asked, tokens, strict=True):
            assert_beginning(texts()[number], item, found)
        if steps >= STEPS:
            break
    assert_no_drift(history)


def draft_is_committed(served):
    """draft_len == target_len for every request that is at work."""
    active = np.asarray(served.state.active)
    lengths = np.asarray(served.state.length)
    return (np.asarray(served.draft_state.next)[active] == lengths[active]).all()


def assert_beginning(text, asked, tokens):
    """What was generated is the beginning of the text that the model writes alone."""
    assert tokens == text[len(asked.prompt) :][: len(tokens)]
    assert not set(tokens[:-1]) & set(asked.stop)


def assert_no_drift(history):
    """Tokens per block in each third of the run are within 5 standard errors of all of it."""
    thirds = np.array_split(np.arange(len(history)), 3)
    parts = [sum((history[i] for i in third), Acceptance()) for third in thirds]
    whole = sum(parts, Acceptance())
    spread = 1.5  # of the tokens of one block: they lie between 1 and 4
    assert whole.length > 1.5
    for part in parts:
        assert abs(part.length - whole.length) < 5 * spread / part.blocks**0.5
