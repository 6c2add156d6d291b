"""The Linen example: its logits are those of the model without any cache, under every policy."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax import Policy
from dhisparse_jax.hierarchy import check_invariants
from tests.examples import linen_gqa
from tests.examples.counting import hierarchy_lines

REQUESTS, STEPS, CAPACITY = 2, 48, 64
MODEL = linen_gqa.Model(context=CAPACITY)


def texts():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, linen_gqa.VOCAB, (REQUESTS, STEPS)), jnp.int32)


@cache
def params():
    return jax.jit(partial(MODEL.init, method="whole"))(jax.random.key(0), texts())["params"]


@cache
def fed(policy):
    """Logits of every token, and the records that came from the host."""
    cfg = linen_gqa.sizes(policy, REQUESTS, CAPACITY, hot_rows=8)

    def run(params, carry, tokens):
        def one(carry, tokens):
            carry, logits = linen_gqa.feed(MODEL, cfg, params, carry, tokens)
            return carry, (logits, carry[0].counts.fetched)

        return jax.lax.scan(one, carry, tokens)

    carry = linen_gqa.start(cfg)
    (state, _), told = jax.jit(run, donate_argnums=1)(params(), carry, texts().T)
    assert all(check_invariants(state, cfg).values())
    return [np.asarray(each) for each in told]


@pytest.mark.parametrize("policy", Policy)
def test_policies_agree_bit_by_bit(policy):
    logits, fetched = fed(policy)
    np.testing.assert_array_equal(logits, fed(Policy.RESIDENT)[0])
    assert (fetched.sum() > 0) == (policy is not Policy.RESIDENT)


def test_logits_are_those_of_the_model_without_a_cache():
    whole = jax.jit(partial(MODEL.apply, method="whole"))({"params": params()}, texts())
    logits, _ = fed(Policy.ADAPTIVE)
    np.testing.assert_allclose(logits.swapaxes(0, 1), whole, rtol=1e-4, atol=2e-5)


def test_the_hierarchy_takes_less_than_60_lines():
    assert 20 < hierarchy_lines(Path(linen_gqa.__file__)) < 60
