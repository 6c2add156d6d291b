"""The drafters against a second model in NumPy float64, and the ring that they keep."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.sampling import greedy
from tests.support.small_attached import (
    KINDS,
    drafter,
    expected,
    random_features,
    small,
)

WINDOW = 5
LENGTHS = (1, 4, 5, 6, 11, 30)
"""Committed positions: fewer than the ring has, as many, and more."""


@cache
def functions(kind):
    own, _ = drafter(kind)
    return jax.jit(own.commit), jax.jit(own.propose), jax.jit(own.block)


def committed(kind, features, lengths):
    """A state with so many positions of every request."""
    own, params = drafter(kind)
    requests = len(lengths)
    start, count = jnp.zeros(requests, jnp.int32), jnp.asarray(lengths, jnp.int32)
    return functions(kind)[0](params, own.init(requests), features, start, count)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_numpy_model(kind):
    own, params = drafter(kind)
    features = random_features(kind, len(LENGTHS), max(LENGTHS))
    state = committed(kind, features, LENGTHS)
    anchors, lengths = jnp.arange(10, 16, dtype=jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
    got = functions(kind)[1](params, state, anchors, lengths, greedy(len(LENGTHS)))
    _, normed = functions(kind)[2](params, state, anchors, lengths)
    for row, (length, anchor) in enumerate(zip(LENGTHS, range(10, 16), strict=True)):
        block = expected(kind, features[row, :length], anchor)
        assert block.margin > 1e-4
        assert got.tokens[row].tolist() == block.tokens
        assert np.abs(got.confidence[row] - block.confidence).max() < 1e-5
        known = small(kind).weights[f"mtp.{own.config.stages - 1}.markov_head.markov_w2.weight"]
        first = small(kind).weights[f"mtp.{own.config.stages - 1}.markov_head.markov_w1.weight"]
        bias = first[[anchor, *block.tokens[:-1]]] @ known.T
        assert np.abs(normed[row] @ params["head"] + bias - block.logits).max() < 4e-5
