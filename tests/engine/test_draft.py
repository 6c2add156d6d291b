"""Speculation changes how many steps a text takes, never the text (greedy, float32)."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Finished, NewTokens, StepDone
from dhisparse_jax.engine.request import Request
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.sampling import Sampling, sampler_row, target_logits
from tests.support.dense import dense_logits
from tests.support.serving import CONTEXT, POLICIES, config, drafted, engine, model, request, run
from tests.support.toy_draft import toy_draft, with_errs

# Lengths around K, the tail, the chunk, the window, and the context; more requests than rows.
REQUESTS = [
    request(5, 30),
    request(40, 20, seed=1),
    request(CONTEXT - 4, 30, seed=2),
    request(1, 50, seed=3),
    request(33, 1, seed=4),
    request(16, 25, seed=5),
    request(CONTEXT - 1, 9, seed=6),
    request(11, 2, seed=7),
]


@cache
def plain():
    """The texts without any draft."""
    return run(engine("resident", 1), REQUESTS)


def texts():
    return [[*asked.prompt, *plain().tokens[n]] for n, asked in enumerate(REQUESTS)]


@cache
def served_with(policy, length, steps=1):
    """One engine per program: compiling one takes seconds."""
    return drafted(*POLICIES[policy], toy_draft(texts(), length=length), steps=steps)


@cache
def speculated(policy, length, errs=5, steps=1):
    served = with_errs(served_with(policy, length, steps), errs)
    failed = []

    def check():
        report = check_invariants(served.state, served.cfg)
        failed.extend(key for key, holds in report.items() if not holds)

    result = run(served, REQUESTS, after_step=check)
    assert failed == []
    return result


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        pytest.param("resident", 3, marks=pytest.mark.slow),
        pytest.param("fixed", 3, marks=pytest.mark.slow),
        ("adaptive", 3),
        pytest.param("fixed", 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 6, marks=pytest.mark.slow),
    ],
)
def test_same_tokens_for_every_policy_and_length(policy, length):
    result = speculated(policy, length)
    assert result.tokens == plain().tokens
    assert result.finished == plain().finished


@pytest.mark.parametrize("errs", [0, 16])
def test_same_tokens_for_a_good_and_for_a_useless_draft(errs):
    result = speculated("fixed", 3, errs)
    assert result.tokens == plain().tokens
    assert result.finished == plain().finished


def test_same_tokens_with_several_steps_in_a_dispatch():
    result = speculated("adaptive", 3, steps=2)
    assert result.tokens == plain().tokens
    assert result.finished == plain().finished


def test_several_steps_without_a_draft():
    served = Engine(*model(), config("fixed", 4), chunk=16, steps=4)
    result = run(served, REQUESTS)
    assert (result.tokens, result.finished) == (plain().tokens, plain().finished)
    assert result.acceptance.length == 1.0


def test_acceptance_is_counted():
    """Blocks and accepted proposals account for every token but those of the prefills."""
    for errs, low, high in ((0, 3.0, 4.0), (5, 1.3, 3.0), (16, 1.0, 1.2)):
        acceptance = speculated("fixed", 3, errs).acceptance
        tokens = sum(map(len, plain().tokens.values())) - len(REQUESTS)
        assert acceptance.blocks + sum(acceptance.accepted) == tokens
        assert low <= acceptance.length <= high
        shares = acceptance.by_position
        assert len(shares) == 3
        assert list(shares) == sorted(shares, reverse=True)
        assert all(a <= v for a, v in zip(acceptance.accepted, acceptance.verified, strict=True))


def test_fewer_steps_with_a_better_draft():
    good, bad = speculated("fixed", 3, 0), speculated("fixed", 3, 16)
    assert len(good.steps) < len(plain().steps) / 2
    assert len(bad.steps) <= len(plain().steps)


def test_events_carry_several_tokens():
    served = with_errs(served_with("fixed", 3), errs=0)
    events = list(served.run(REQUESTS[:1]))
    sizes = [len(event.tokens) for event in events if isinstance(event, NewTokens)]
    assert sizes[0] == 1  # of the prefill
    assert sum(sizes) == 30
    assert max(sizes) == 4
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps == list(range(1, len(steps) + 1))
    assert isinstance(events[-1], Finished)


def test_stop_token_inside_a_block_ends_the_request_there():
    tokens = plain().tokens[0]
    served = with_errs(served_with("fixed", 3), errs=0)
    for place in range(1, 10):
        stop = tokens[place]
        asked = request(5, 30, stop=(60 - stop if 60 - stop not in tokens else 999, stop))
        result = run(served, [asked])
        assert result.tokens[0] == tokens[: tokens.index(stop) + 1]
        assert result.finished == {0: "stop"}


def test_no_compilation_after_warm_up():
    served = served_with("adaptive", 3)
    run(served, REQUESTS[:2])
    traces = served.compiled.traces()
    run(served, REQUESTS)
    assert served.compiled.traces() == traces


def test_draft_that_does_not_fit():
    with pytest.raises(UserError, match=r"reads layer 3 of the target, .* 3 layers"):
        drafted(*POLICIES["fixed"], toy_draft(taps=(0, 3)))
    served = Engine(*model(), config("fixed", 4, queries=2), draft=toy_draft(length=3))
    with pytest.raises(UserError, match=r"2 verify queries .* draft of 3 tokens needs 4"):
        list(served.run(REQUESTS[:1]))


def test_draft_longer_than_the_tail():
    with pytest.raises(UserError, match="a tail of 6 cannot hold 4 verify queries"):
        HierarchyConfig(
            geometry=model()[0].geometry,
            policy=Policy.FIXED,
            requests=1,
            capacity=CONTEXT,
            queries=4,
            hot_rows=4,
            tail=6,
        )


@pytest.mark.slow
def test_sampled_tokens_have_the_target_distribution():
    """The first two of four tokens, many times: their joint distribution is the target's.

    The prefill draws the first, a block the second; with the 3 most likely tokens there are 9
    pairs, whose probabilities follow from the model without a hierarchy.
    """
    sampling = lambda seed: Sampling(temperature=1.5, top_k=3, seed=seed)
    served = with_errs(served_with("fixed", 3), errs=0)
    count, prompt = 400, REQUESTS[0].prompt
    asked = [
        Request(name="it", prompt=prompt, max_new_tokens=4, sampling=sampling(7))
        for _ in range(count)
    ]
    result = run(served, asked)
    assert sum(result.acceptance.accepted) > 0
    seen = Counter(tuple(tokens[:2]) for tokens in result.tokens.values())
    rows = sampler_row(sampling(0), 0)
    after = lambda text: np.asarray(
        jax.nn.softmax(target_logits(jnp.asarray(dense_logits(*model(), text)[-1:]), rows))[0]
    ).astype(np.float64)
    expected = {}
    for first in np.flatnonzero(after(prompt)):
        second = after((*prompt, int(first)))
        for token in np.flatnonzero(second):
            expected[int(first), int(token)] = after(prompt)[first] * second[token]
    assert set(seen) <= set(expected)
    found = [seen[pair] for pair in expected]
    wanted = np.array(list(expected.values()))
    assert stats.chisquare(found, wanted / wanted.sum() * count).pvalue > 1e-3
