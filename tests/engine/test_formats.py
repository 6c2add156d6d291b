"""History in every format: the policy and the way into the hierarchy change no bit of it."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest

from bench.replay import as_recorded, replay
from bench.simulate import figures
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.exchange import session_bytes
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.engine.memory import sizes
from dhisparse_jax.engine.recording import Recorder, read_recording
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.session import check_session
from dhisparse_jax.engine.store import load_session, save_session
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import SCALED_KEYS, RowFormat
from dhisparse_jax.hierarchy.formats import stored_keys, stored_rows
from tests.support.dense import dense_logits
from tests.support.fp8 import row_words, scaled_numbers
from tests.support.jobs import Heard, drain
from tests.support.serving import CHUNK, CONTEXT, POLICIES, TOP_K, prompt, request, run
from tests.support.toy_draft import toy_draft
from tests.support.toy_model import toy

FP8_ROW = RowFormat.fp8(8, 4).dtype
FORMS = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "fp8": (FP8_ROW, SCALED_KEYS),
}
"""Rows, and index keys."""

BASE = prompt(60, seed=50)
SHARED = [
    Request(name=f"{shared}", prompt=(*BASE[:shared], *prompt(own, seed=shared)), max_new_tokens=12)
    for shared, own in ((50, 5), (33, 20), (48, 1), (50, 5))
]
REQUESTS = [request(5, 20), request(CONTEXT - 9, 30, seed=2), request(33, 1, seed=4), *SHARED]
"""More requests than rows, of which some begin alike."""

TOKENS = prompt(CONTEXT - 3, seed=11)


@cache
def model(form):
    row, keys = FORMS[form]
    return toy(layers_per_pool=(1, 2), top_k=TOP_K, context=CONTEXT, row=row, index=(8, keys))


def config(form, policy, queries=1):
    name, hot_rows = POLICIES[policy]
    return HierarchyConfig(
        geometry=model(form)[0].geometry,
        policy=Policy(name),
        requests=3,
        capacity=CONTEXT,
        queries=queries,
        hot_rows=hot_rows,
        tail=max(4, 2 * queries),
    )


@cache
def _engine(form, policy, queries):
    return Engine(*model(form), config(form, policy, queries), chunk=CHUNK)


def engine(form, policy, queries=1):
    served = _engine(form, policy, queries)
    served.sharing.forget()
    return served


@cache
def tokens(form, policy):
    return run(engine(form, policy), REQUESTS).tokens


@cache
def logits(form, policy, queries=1, split=40):
    pieces = forced_logits(engine(form, policy, queries), TOKENS, split)
    return np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        pytest.param("fp8", "fixed", marks=pytest.mark.slow),
        ("fp8", "adaptive"),
        pytest.param("bfloat16", "adaptive", marks=pytest.mark.slow),
    ],
)
def test_same_tokens_under_every_policy(form, policy):
    """Requests join, leave, and share their beginnings."""
    assert tokens(form, policy) == tokens(form, "resident")


@pytest.mark.parametrize(
    ("policy", "queries"),
    [
        pytest.param("fixed", 1, marks=pytest.mark.slow),
        ("adaptive", 1),
        pytest.param("fixed", 4, marks=pytest.mark.slow),
        pytest.param("adaptive", 4, marks=pytest.mark.slow),  # the same tokens below
    ],
)
def test_same_bits_under_every_policy(policy, queries):
    found = logits("fp8", policy, queries)
    np.testing.assert_array_equal(found, logits("fp8", "resident", queries))


@pytest.mark.parametrize("queries", [1, 4])
def test_logits_are_those_of_history_that_is_rounded_once(queries):
    """The whole text at once, without a cache, over rows and keys rounded by hand.

    Not in bfloat16: its steps are so many that a float32 sum in another order lands on another one.
    """
    found = logits("fp8", "fixed", queries)
    np.testing.assert_allclose(found, dense_logits(*model("fp8"), TOKENS), rtol=1e-4, atol=1e-4)


def test_texts_are_worth_comparing():
    """Another format gives other texts, of many different tokens."""
    texts = tokens("fp8", "resident")
    assert texts != tokens("bfloat16", "resident")
    assert len({token for text in texts.values() for token in text}) > 20


@pytest.mark.slow
def test_shared_history_gives_the_tokens_of_a_request_alone():
    served, found = engine("fp8", "resident"), tokens("fp8", "fixed")
    for number, asked in enumerate(REQUESTS):
        assert run(served, [asked]).tokens[0] == found[number]


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("split", [1, TOP_K, CHUNK + 1, len(TOKENS)])
def test_the_split_between_prefill_and_decode_changes_nothing(split, queries):
    """A prefilled row is rounded as a decoded one is, and read in its format by both.

    As much as in float32, where matrices of other shapes are summed in another order.
    """
    found = logits("fp8", "fixed", queries, split)
    np.testing.assert_allclose(found, logits("fp8", "fixed"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [pytest.param("fixed", marks=pytest.mark.slow), "adaptive"])
def test_same_tokens_with_a_draft(policy):
    """T = 4; the text is that of one query per step."""
    asked = REQUESTS[:3]
    texts = [[*item.prompt, *tokens("fp8", "resident")[n]] for n, item in enumerate(asked)]
    draft = toy_draft(texts)
    cfg = config("fp8", policy, draft.drafter.length + 1)
    served = Engine(*model("fp8"), cfg, chunk=CHUNK, draft=draft)
    found = run(served, asked)
    assert [found.tokens[n] for n in range(3)] == [tokens("fp8", "resident")[n] for n in range(3)]
    assert found.acceptance.length > 1.5


def test_a_session_goes_on_from_disk(tmp_path):
    served, heard, asked = engine("fp8", "adaptive"), Heard(), REQUESTS[0]
    number = served.submit(asked)
    for _ in range(3):
        for event in served.advance():
            heard.add(event)
    save_session(tmp_path, served.save(number))
    drain(served, heard)
    session = load_session(tmp_path)
    assert session.nbytes == session_bytes(served, len(session.text) - 1)
    other = engine("fp8", "fixed")
    resumed = other.resume(session)
    rest = drain(other).tokens[resumed]
    assert [*session.produced, *rest] == heard.tokens[number] == tokens("fp8", "resident")[0]


def test_preempted_requests_go_on_with_the_same_tokens():
    """Their rows and index keys come back from host memory as they went there."""
    served, heard = engine("fp8", "adaptive"), Heard()
    numbers = [served.submit(item) for item in REQUESTS[:2]]
    preempted = 0
    for turn in range(20):
        for event in served.advance():
            heard.add(event)
        preempted += served.preempt(numbers[turn % 2])
    drain(served, heard)
    assert preempted > 2
    found = [heard.tokens[number] for number in numbers]
    assert found == [tokens("fp8", "resident")[number] for number in range(2)]


def test_a_session_of_another_format_is_refused():
    served = engine("fp8", "fixed")
    number = served.submit(REQUESTS[0])
    list(served.advance())
    session = served.save(number)
    drain(served)
    with pytest.raises(UserError, match="the session is of model"):
        engine("bfloat16", "fixed").resume(session)
    with pytest.raises(UserError, match="records and keys of pool 0 are"):
        check_session(session, session.model, config("bfloat16", "fixed"))


def test_stored_bytes_are_those_of_the_format():
    """Quantised once: what decode and prefill store is what the format says of the same numbers."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=(40, 12)).astype(np.float32) * 10.0 ** rng.uniform(-20, 20, (40, 1))
    values = values.astype(np.float32)
    values[7] = 0.0
    for powers in (False, True):
        row = RowFormat.fp8(8, 4, power_scales=powers)
        found = jax.jit(lambda values, row=row: stored_rows(row, values))(values)
        np.testing.assert_array_equal(found, row_words(values, row.dtype))
    found = stored_keys(model("fp8")[0].geometry, jax.numpy.asarray(values))
    numbers, scales = scaled_numbers(values)
    np.testing.assert_array_equal(found.numbers.view(np.uint8), numbers.view(np.uint8))
    np.testing.assert_array_equal(found.scales, scales)


@pytest.mark.slow
def test_a_recording_keeps_the_format(tmp_path):
    """And is replayed, in a state without any rows or keys."""
    cfg = dataclasses.replace(config("fp8", "fixed"), record_selections=True)
    served = Engine(*model("fp8"), cfg, chunk=CHUNK)
    path = tmp_path / "run.sel"
    with path.open("wb") as file:
        recorder = Recorder(file, cfg)
        served.watcher = recorder
        found = run(served, REQUESTS[:3])
        recorder.finish()
    recording = read_recording(path)
    assert recording.cfg == cfg
    replayed = figures(cfg, replay(cfg, as_recorded(recording)))
    assert replayed["fetched_rows"] == found.total.fetched_rows > 0


def test_bytes_of_fp8_history():
    """8 numbers, a scale and 4 bfloat16 in 24 bytes; keys of 8 numbers and a scale."""
    geometry = model("fp8")[0].geometry
    assert (geometry.row.words, geometry.key_bytes) == (6, 12)
    of = sizes(config("fp8", "fixed"))
    assert of.index_bytes == 2 * 3 * CONTEXT * 12
    assert geometry.position_bytes == 3 * 24 + 2 * 12
