"""Logits of given tokens: prefill and decode agree with each other and with dense attention."""

import numpy as np
import pytest

from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.errors import UserError
from tests.support.dense import dense_logits
from tests.support.serving import (
    CONTEXT,
    POLICIES,
    TOP_K,
    engine,
    is_idle,
    model,
    prompt,
    request,
    run,
)

LENGTH = CONTEXT - 3
TOKENS = prompt(LENGTH, seed=11)
ONE = POLICIES["fixed"]
VERIFY = {"queries": 4}


def logits(served, split, tokens=TOKENS):
    pieces = [p for p in forced_logits(served, tokens, split) if isinstance(p, np.ndarray)]
    return np.concatenate(pieces)


@pytest.fixture(scope="module")
def dense():
    return dense_logits(*model(), TOKENS)


# Splits around a single position, K, the tail, the prefill chunk, and everything.
@pytest.mark.parametrize("split", [1, 3, TOP_K, TOP_K + 1, 16, 17, 50, LENGTH - 1, LENGTH])
def test_decode_equals_dense(dense, split):
    found = logits(engine(*ONE), split)
    assert found.shape == dense.shape
    np.testing.assert_allclose(found, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("split", [1, 2, 3, 4, 50, LENGTH - 1])
def test_verify_queries_equal_single_steps(split):
    single = logits(engine(*ONE), split)
    together = logits(engine(*ONE, **VERIFY), split)
    np.testing.assert_allclose(together, single, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(together.argmax(axis=1), single.argmax(axis=1))


@pytest.mark.parametrize("policy", ["resident", "adaptive"])
def test_policies_give_the_same_bits(policy):
    found = logits(engine(*POLICIES[policy]), 40)
    np.testing.assert_array_equal(found, logits(engine(*ONE), 40))


def test_row_is_free_afterwards():
    served = engine(*ONE)
    logits(served, 20)
    assert is_idle(served)


@pytest.mark.parametrize("pieces", [1, 5, 20])
def test_giving_up_frees_the_row(pieces):
    """1 and 5 stop during prefill, 20 during decoding."""
    served = engine(*ONE)
    stream = forced_logits(served, TOKENS, 40)
    for _ in range(pieces):
        next(stream)
    stream.close()
    assert is_idle(served)
    again = request(20, 5)
    assert run(served, [again]).tokens == run(engine("resident", 1), [again]).tokens


@pytest.mark.parametrize("split", [0, -1, LENGTH + 1])
def test_split_outside_the_text(split):
    with pytest.raises(UserError, match=f"split of {split} is outside 1..{LENGTH}"):
        logits(engine(*ONE), split)


def test_longest_text():
    """With T queries, the last step needs T positions."""
    logits(engine(*ONE), CONTEXT - 2, prompt(CONTEXT))
    logits(engine(*ONE, **VERIFY), CONTEXT - 5, prompt(CONTEXT - 3))
    with pytest.raises(UserError, match=f"{CONTEXT + 1} tokens do not fit"):
        logits(engine(*ONE), 1, prompt(CONTEXT + 1))
    with pytest.raises(UserError, match=f"{CONTEXT - 2} tokens do not fit"):
        logits(engine(*ONE, **VERIFY), 1, prompt(CONTEXT - 2))
