"""The attached drafters in the engine: the text stays the same, and the ring is right."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.speculation.protocol import Draft
from tests.fixtures.make_v41_fixture import make_tokenizer, text_words
from tests.support import numpy_v41, small_v4, small_v41
from tests.support.serving import failed, run
from tests.support.small_attached import drafter, knowing, small
from tests.support.small_v4 import POLICIES

TARGETS = {"v4": small_v4, "v41": small_v41}


def requests(kind):
    """Prompts shorter and longer than the ring, and texts around the context; more than rows."""
    ask = TARGETS[kind].request
    return [ask(3, 24), ask(21, 16, seed=1), ask(small_v4.CONTEXT - 4, 30, seed=2), ask(1, 40)]


@cache
def plain(kind):
    """Greedy texts without a draft."""
    asked = requests(kind)
    tokens = run(TARGETS[kind].engine("resident"), asked).tokens
    return [[*one.prompt, *tokens[number]] for number, one in enumerate(asked)]


@cache
def drafted(kind, policy):
    draft, target = knowing(kind, plain(kind)), TARGETS[kind]
    cfg = target.config(*POLICIES[policy], queries=draft.drafter.length + 1)
    return Engine(*target.model(), cfg, chunk=5, draft=draft)


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("kind", list(TARGETS))
def test_greedy_tokens_are_those_without_a_draft(kind, policy):
    served, broken = drafted(kind, policy), []
    asked = requests(kind)
    result = run(served, asked, after_step=lambda: broken.extend(failed(served)))
    for number, text in enumerate(plain(kind)):
        assert result.tokens[number] == text[len(asked[number].prompt) :]
    assert broken == []
    assert 0 < sum(result.acceptance.accepted) < sum(result.acceptance.verified)


@pytest.mark.slow
def test_a_text_and_the_ring_are_those_of_the_numpy_model():
    """A random draft, which is hardly ever right."""
    cfg = small_v41.config(*POLICIES["fixed"], requests=1, queries=5)
    served = Engine(*small_v41.model(), cfg, chunk=5, draft=Draft(*drafter("v41")))
    asked = small_v41.request(8, 12, seed=4)
    text = [*asked.prompt, *run(served, [asked]).tokens[0]]
    committed = int(served.draft_state.next[0])
    assert committed >= len(text) - 1
    trace = numpy_trace(text)
    best = trace.logits.argmax(axis=-1)[len(asked.prompt) - 1 : -1]
    assert text[len(asked.prompt) :] == best.tolist()
    assert ring_error(served, 0, numpy_trace(text[:committed])) < 4e-5


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 21])
def test_the_ring_has_what_the_numpy_model_says_of_the_text(length):
    """After prefill in pieces, accepted and rejected tokens, and more positions than slots."""
    served, asked, rows = drafted("v41", "fixed"), small_v41.request(length, 24, seed=4), []
    note = lambda: rows.append(int(np.asarray(served.state.active).argmax()))
    text = [*asked.prompt, *run(served, [asked], after_step=note).tokens[0]]
    row = rows[0]
    committed = int(served.draft_state.next[row])
    assert length + 10 < committed <= len(text)
    assert ring_error(served, row, numpy_trace(text[:committed])) < 4e-5


def numpy_trace(text):
    words = text_words(make_tokenizer())
    return numpy_v41.model(small_v41.TEXT, small_v41.weights(), np.array(text), words)


def ring_error(served, row, trace):
    """How far a row's ring is from one of the features of the NumPy model."""
    features = np.concatenate([trace.features[tap] for tap in small("v41").config.taps], axis=-1)
    own, params = drafter("v41")
    count = jnp.asarray([len(features)], jnp.int32)
    given = jnp.asarray(features[None], jnp.float32)
    whole = own.commit(params, own.init(1), given, jnp.zeros(1, jnp.int32), count)
    numbers = [
        np.asarray(keys).view(np.float32) for keys in (whole.keys[0], served.draft_state.keys[row])
    ]
    return np.abs(numbers[0] - numbers[1]).max()
