"""DeepSeek-V4.1 over the hierarchy: prefill and decode, policies, rejected rows, other requests."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.errors import UserError
from tests.support.serving import failed, forced, run
from tests.support.small_v4 import POLICIES, table_draft
from tests.support.small_v41 import (
    CONTEXT,
    LOGITS,
    TOKENS,
    config,
    dense,
    engine,
    model,
    request,
)
from tests.support.toy_draft import toy_draft

# Lengths around the window, the rates, a chunk and the context; more requests than rows.
REQUESTS = [
    request(5, 20),
    request(21, 12, seed=1),
    request(CONTEXT - 4, 30, seed=2),
    request(1, 40, seed=3),
]


@pytest.mark.parametrize(
    ("policy", "queries", "split"),
    [
        ("fixed", 4, 14),
        pytest.param("fixed", 4, 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 1, 6, marks=pytest.mark.slow),
        pytest.param("resident", 1, 49, marks=pytest.mark.slow),
        pytest.param("fixed", 1, 20, marks=pytest.mark.slow),
        pytest.param("resident", 4, 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 4, 33, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_numpy_model(policy, queries, split):
    logits, _ = forced(engine(policy, queries), TOKENS, split)
    assert np.abs(logits - LOGITS).max() < 4e-5
    assert failed(engine(policy, queries)) == []


@pytest.mark.parametrize(
    ("policy", "queries"),
    [
        pytest.param("fixed", 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 1, marks=pytest.mark.slow),
        pytest.param("fixed", 4, marks=pytest.mark.slow),
        pytest.param("adaptive", 4, marks=pytest.mark.slow),
    ],
)
def test_policies_agree_bit_for_bit(policy, queries):
    """Also where records come from the host, and selections of a pool take each other's slots."""
    expected, none = forced(engine("resident", queries), TOKENS, 9)
    logits, fetched = forced(engine(policy, queries), TOKENS, 9)
    assert np.array_equal(logits, expected)
    assert none == 0
    assert fetched > 0 or policy == "adaptive"


@pytest.mark.slow
def test_pieces_of_a_prompt_do_not_matter():
    for chunk in (1, 16, 49):
        logits, _ = forced(Engine(*model(), config("resident", 1), chunk=chunk), TOKENS, 40)
        assert np.abs(logits - LOGITS).max() < 4e-5


@cache
def alone():
    """Greedy texts, each token from a whole-sequence forward."""
    texts = []
    for asked in REQUESTS:
        text = list(asked.prompt)
        new = min(asked.max_new_tokens, CONTEXT - len(text))
        events = run(engine("resident"), [asked])
        assert len(events.tokens[0]) == new
        text += events.tokens[0]
        logits = dense(text + [0] * (CONTEXT - len(text)))[0]  # one length for all
        best = logits.argmax(axis=-1)[len(asked.prompt) - 1 : len(text) - 1]
        assert events.tokens[0] == best.tolist()
        texts.append(text)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(POLICIES))
def test_requests_that_come_and_go_get_the_tokens_they_have_alone(policy):
    served, broken = engine(policy), []
    result = run(served, REQUESTS, after_step=lambda: broken.extend(failed(served)))
    for number, asked in enumerate(REQUESTS):
        assert result.tokens[number] == alone()[number][len(asked.prompt) :]
    assert broken == []


@pytest.mark.slow
def test_the_last_of_many_requests_has_the_tokens_of_the_first():
    """With a budget of odd size that holds some pools' histories, and not those of others."""
    served, again = Engine(*model(), config("fixed", 51), chunk=16), request(30, 12)
    first = run(served, [again]).tokens[0]
    for seed in range(1, 16):
        run(served, [request(30, 12, seed=seed)])
    assert failed(served) == []
    (last,) = run(served, [again]).tokens.values()
    assert last == first


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(POLICIES))
def test_rejected_tokens_leave_no_trace(policy):
    """A draft that errs at every third position; what it wrote is in no later token."""
    for number, asked in enumerate(REQUESTS[:3]):
        text = alone()[number]
        served = engine(policy, 4)
        table = table_draft([text, text], 3).params
        served.draft_params = jax.device_put(table, jax.devices()[0])
        result = run(served, [asked])
        assert result.tokens[0] == text[len(asked.prompt) :]
        assert failed(served) == []
        if len(result.tokens[0]) > 10:
            assert 0 < sum(result.acceptance.accepted) < sum(result.acceptance.verified)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_small_history_is_rounded_once(form):
    """Other logits than in float32, and the same ones under every policy and of a whole text."""
    expected, _, _ = dense(TOKENS, form)
    assert 1e-3 < np.abs(expected - LOGITS).max() < 8.0  # selections differ too
    found = []
    for policy in ("resident", "fixed"):
        cfg = config(*POLICIES[policy], form=form)
        logits, _ = forced(Engine(*model(form), cfg, chunk=5), TOKENS, 20)
        off = np.abs(logits - expected).max(axis=-1)
        # Sums in another order round a number between two to the other one, which fades away.
        assert (off < 1e-5).mean() > 0.7
        assert off.max() < 0.05
        found.append(logits)
    assert np.array_equal(*found)


def test_drafts_that_read_layers_beyond_are_refused():
    with pytest.raises(UserError, match=r"reads layer 6 of the target, .* 6 layers \(0 to 5\)"):
        draft = toy_draft(vocabulary=87, taps=(5, 6))
        Engine(*model(), config("fixed", 2, queries=4), draft=draft)


def test_a_page_of_host_memory_has_whole_records_of_every_pool():
    with pytest.raises(UserError, match="a record stands for 3 positions; a page holds whole"):
        dataclasses.replace(config("fixed", 2), host_page=16)
