"""The NNX example: its tokens are those of the model without any cache, under every policy."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhisparse_jax import Policy
from dhisparse_jax.hierarchy import check_invariants
from tests.examples import nnx_mla
from tests.examples.counting import hierarchy_lines

PROMPTS, STEPS, CAPACITY = (37, 24), 20, 64


def prompt(length):
    return jnp.asarray(np.random.default_rng(length).integers(0, nnx_mla.VOCAB, length), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return nnx_mla.Model(nnx.Rngs(0))


@pytest.fixture(scope="module")
def written(model):
    """What each policy writes: tokens, logits and fetched records of every step."""
    runs = {}
    for policy in Policy:
        decoder = nnx_mla.Decoder(model, nnx_mla.sizes(policy, 2, CAPACITY, hot_rows=12))
        state, tokens = decoder.state, []
        for request, length in enumerate(PROMPTS):
            logits, state = decoder.enter(decoder.weights, state, request, prompt(length))
            tokens.append(jnp.argmax(logits))
        state, _, told = decoder.write(decoder.weights, state, jnp.stack(tokens), STEPS)
        cfg = nnx_mla.sizes(policy, 2, CAPACITY, hot_rows=12)
        assert all(check_invariants(state, cfg).values())
        runs[policy] = [np.asarray(each) for each in told]
    return runs


def test_tokens_are_those_of_the_model_without_a_cache(model, written):
    tokens, logits, _ = written[Policy.ADAPTIVE]
    for request, length in enumerate(PROMPTS):
        text = jnp.concatenate([prompt(length), tokens[:, request]])
        whole = model.whole(text[None])[0][0]
        np.testing.assert_allclose(logits[:, request], whole[length:], rtol=1e-4, atol=2e-5)
        np.testing.assert_array_equal(tokens[:, request], whole[length - 1 : -1].argmax(-1))


@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.ADAPTIVE])
def test_policies_agree_bit_by_bit(written, policy):
    for mine, resident in zip(written[policy][:2], written[Policy.RESIDENT][:2], strict=True):
        np.testing.assert_array_equal(mine, resident)


def test_history_comes_from_host_memory(written):
    fetched = {policy: told[2].sum() for policy, told in written.items()}
    assert fetched[Policy.RESIDENT] == 0
    assert fetched[Policy.FIXED] > 0


def test_the_hierarchy_takes_less_than_60_lines():
    assert 20 < hierarchy_lines(Path(nnx_mla.__file__)) < 60
