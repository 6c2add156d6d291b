"""The beginning of a descending order, against NumPy's stable sort in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.leading import leading
from dhisparse_jax.sampling import Sampling, sampler_row, target_logits
from pallas_kernels.top_k.keys import keys_of

ROWS, WIDTH = 6, 61
RNG = np.random.default_rng(0)
LARGEST = np.finfo(np.float32).max

LOGITS = {
    "normal": RNG.normal(size=(ROWS, WIDTH), scale=3.0),
    "ties": RNG.integers(-2, 3, (ROWS, WIDTH)),
    "all alike": np.full((ROWS, WIDTH), 1.5),
    "zeros of both signs": np.where(RNG.random((ROWS, WIDTH)) < 0.5, 0.0, -0.0),
    "some that are out": np.where(RNG.random((ROWS, WIDTH)) < 0.4, -np.inf, 0.7),
    "the largest and the least": RNG.choice([LARGEST, -LARGEST, 1e-38, -1e-38], (ROWS, WIDTH)),
    "one token": np.where(np.arange(WIDTH) == 7, 60.0, RNG.normal(size=(ROWS, WIDTH))),
}


def order_of(logits):
    return np.argsort(-logits, axis=-1, kind="stable")


def before(weights, order):
    """Weights of what stands before each place, in float64."""
    ranked = np.take_along_axis(weights.astype(np.float64), order, axis=-1)
    sums = np.cumsum(ranked, axis=-1) - ranked
    found = np.empty_like(sums)
    np.put_along_axis(found, order, sums, axis=-1)
    return found


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("count", [1, 2, 17, WIDTH - 1, WIDTH, WIDTH + 5])
def test_counts_are_exact(name, count):
    logits = np.asarray(LOGITS[name], np.float32)
    keys, budget = keys_of(jnp.asarray(logits)), jnp.full(ROWS, count, jnp.float32)
    found = jax.jit(leading)(keys, jnp.ones(logits.shape), budget)
    np.testing.assert_array_equal(found, before(np.ones(logits.shape), order_of(logits)) < count)


def test_the_choice_of_a_token_has_no_sort():
    rows = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (40, *leaf.shape[1:])), sampler_row(Sampling(), 0)
    )
    text = jax.jit(target_logits).lower(jnp.zeros((40, 1 << 17)), rows).as_text()
    assert "sort" not in text and "while" not in text
