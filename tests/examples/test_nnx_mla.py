"""The NNX example: its tokens are those of the model without any cache, under every policy."""

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhisparse_jax import Policy
from dhisparse_jax.hierarchy import check_invariants
from tests.examples import nnx_mla
from tests.examples.counting import hierarchy_lines

LENGTH, REQUESTS, STEPS, CAPACITY = 37, 2, 20, 64


def prompt(request):
    return jnp.asarray(np.random.default_rng(request).integers(0, nnx_mla.VOCAB, LENGTH), jnp.int32)


@cache
def model():
    return nnx_mla.Model(nnx.Rngs(0))


@cache
def written(policy):
    """Tokens, logits and fetched records of every step."""
    cfg = nnx_mla.sizes(policy, REQUESTS, CAPACITY, hot_rows=12)
    decoder = nnx_mla.Decoder(model(), cfg)
    state, tokens = decoder.state, []
    for request in range(REQUESTS):
        logits, state = decoder.enter(decoder.weights, state, request, prompt(request))
        tokens.append(jnp.argmax(logits))
    state, _, told = decoder.write(decoder.weights, state, jnp.stack(tokens), STEPS)
    assert all(check_invariants(state, cfg).values())
    return [np.asarray(each) for each in told]


@pytest.mark.parametrize("policy", Policy)
def test_policies_agree_bit_by_bit(policy):
    tokens, logits, fetched = written(policy)
    np.testing.assert_array_equal(tokens, written(Policy.RESIDENT)[0])
    np.testing.assert_array_equal(logits, written(Policy.RESIDENT)[1])
    assert (fetched.sum() > 0) == (policy is not Policy.RESIDENT)


def test_tokens_are_those_of_the_model_without_a_cache():
    tokens, logits, _ = written(Policy.ADAPTIVE)
    whole = nnx.jit(lambda model, text: model.whole(text)[0])
    for request in range(REQUESTS):
        text = jnp.concatenate([prompt(request), tokens[:, request]])
        wanted = whole(model(), text[None])[0]
        np.testing.assert_allclose(logits[:, request], wanted[LENGTH:], rtol=1e-4, atol=2e-5)
        np.testing.assert_array_equal(tokens[:, request], wanted[LENGTH - 1 : -1].argmax(-1))


def test_the_hierarchy_takes_less_than_60_lines():
    assert 20 < hierarchy_lines(Path(nnx_mla.__file__)) < 60
