"""DeepSeek-V4 over the hierarchy: prefill and decode, policies, rejected rows, other requests."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Finished, StepDone
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.engine.recording import Recorder
from dhisparse_jax.errors import UserError
from tests.support.serving import failed, forced, run
from tests.support.small_v4 import (
    CONTEXT,
    FIXTURE,
    LOGITS,
    POLICIES,
    TOKENS,
    config,
    dense,
    engine,
    model,
    request,
    table_draft,
)
from tests.support.toy_draft import toy_draft

# Lengths around the window, the rates, a chunk and the context; more requests than rows.
REQUESTS = [
    request(5, 20),
    request(21, 12, seed=1),
    request(CONTEXT - 4, 30, seed=2),
    request(1, 40, seed=3),
    request(16, 9, seed=4),
    request(34, 25, seed=5),
]


@pytest.mark.parametrize(
    ("policy", "queries", "split"),
    [
        ("fixed", 4, 14),
        pytest.param("adaptive", 1, 6, marks=pytest.mark.slow),
        pytest.param("resident", 1, 49, marks=pytest.mark.slow),
        pytest.param("fixed", 1, 20, marks=pytest.mark.slow),
        pytest.param("resident", 4, 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 4, 33, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_transformers(policy, queries, split):
    logits, _ = forced(engine(policy, queries), TOKENS, split)
    assert np.abs(logits - LOGITS).max() < 4e-5


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_policies_agree_bit_for_bit(policy, queries):
    """Also where records come from the host."""
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


def test_selected_entries_are_those_of_transformers():
    served = engine("fixed", 4)
    selected, found = np.load(FIXTURE / "selected.npz"), []
    logits = forced_logits(served, TOKENS.tolist(), 7)
    for event in logits:
        if isinstance(event, StepDone):
            found.append(np.asarray(served.state.selection[:, 0]))
    for pool, layer in enumerate((1, 4)):
        rows = np.concatenate([step[pool] for step in found])
        expected = np.sort(np.where(selected[f"layer_{layer}"] < 0, 99, selected[f"layer_{layer}"]))
        found_rows = np.where(rows < 0, 99, rows)[: len(TOKENS) - 7]  # the last step is not full
        assert np.array_equal(found_rows, expected[7:])


@cache
def alone():
    """Greedy texts, each token from a whole-sequence forward."""
    texts = []
    for asked in REQUESTS:
        text = list(asked.prompt)
        new = min(asked.max_new_tokens, CONTEXT - len(text))
        served = engine("resident")
        events = run(served, [asked])
        assert len(events.tokens[0]) == new
        text += events.tokens[0]
        logits = dense(text + [0] * (CONTEXT - len(text)))[0]  # one length for all
        best = logits.argmax(axis=-1)[len(asked.prompt) - 1 : len(text) - 1]
        assert events.tokens[0] == best.tolist()
        texts.append(text)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "resident", "adaptive"])
def test_requests_that_come_and_go_get_the_tokens_they_have_alone(policy):
    served = engine(policy)
    broken = []
    result = run(served, REQUESTS, after_step=lambda: broken.extend(failed(served)))
    for number, asked in enumerate(REQUESTS):
        assert result.tokens[number] == alone()[number][len(asked.prompt) :]
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "resident"])
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
def test_history_in_fp8_is_rounded_once():
    """Other logits than in float32, and the same ones under every policy and of a whole text."""
    expected = dense(TOKENS, "fp8")[0]
    assert 1e-3 < np.abs(expected - LOGITS).max() < 2.0
    found = []
    for policy in ("resident", "fixed"):
        cfg = config(*POLICIES[policy], kv_format="fp8")
        logits, _ = forced(Engine(*model("fp8"), cfg, chunk=5), TOKENS, 20)
        assert np.abs(logits - expected).max() < 1e-3
        found.append(logits)
    assert np.array_equal(*found)


@pytest.mark.slow
def test_nothing_is_shared_between_requests():
    """Records are not all that a prefill needs, so a common beginning is computed again."""
    served = engine("fixed")
    same = [request(34, 3, seed=5), request(34, 3, seed=5)]
    result = run(served, same)
    assert result.tokens[0] == result.tokens[1] == alone()[5][34:37]


@pytest.mark.slow
def test_what_would_move_a_history_is_refused_in_one_line():
    served = engine("fixed")
    number = served.submit(REQUESTS[0])
    for _ in range(3):
        list(served.advance())
    with pytest.raises(UserError, match="a session is not possible") as raised:
        served.save(number)
    assert "\n" not in str(raised.value)
    assert not served.preempt(number)
    served.cancel(number)
    while not served.idle:
        list(served.advance())


@pytest.mark.slow
def test_an_urgent_request_waits_for_a_row():
    served = engine("fixed")
    running = [served.submit(asked) for asked in REQUESTS[:2]]
    for _ in range(9):
        list(served.advance())
    urgent = served.submit(REQUESTS[4], priority=1)
    assert served.counts == (2, 1)
    ends = []
    while not served.idle:
        ends += [event.request for event in served.advance() if isinstance(event, Finished)]
    assert set(ends) == {urgent, *running}
    assert ends[0] != urgent


def test_drafts_that_read_layers_beyond_and_recordings_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"reads layer 5 of the target, .* 5 layers \(0 to 4\)"):
        draft = toy_draft(vocabulary=96, taps=(4, 5))
        Engine(*model(), config("fixed", 2, queries=4), draft=draft)
    cfg = config("fixed", 2, record_selections=True)
    with (
        (tmp_path / "run.sel").open("wb") as file,
        pytest.raises(UserError, match="a recording of selections is not possible"),
    ):
        Recorder(file, cfg)


def test_a_page_of_host_memory_has_whole_records():
    with pytest.raises(UserError, match="a page holds whole records"):
        dataclasses.replace(config("fixed", 2), host_page=16)


@pytest.mark.slow
def test_a_step_is_compiled_once():
    served = engine("fixed")
    run(served, REQUESTS[:2])
    before = served.compiled.traces()
    run(served, REQUESTS[2:4])
    assert served.compiled.traces() == before
