"""Attention block by block, against softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.llama.attend import causal, masked_attention, selected, window
from dhisparse_jax.models.llama.model import Heads

SIZE, HEADS, KV_HEADS, WIDTH = 600, 4, 2, 8  # two blocks of keys, the second one not full


def heads():
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (HEADS, KV_HEADS, KV_HEADS)
    return Heads(
        *(jax.random.normal(k, (SIZE, n, WIDTH)) for k, n in zip(keys, counts, strict=True))
    )


def plain(given, seen):
    queries, keys, values = (np.asarray(x, np.float64) for x in given)
    group = np.repeat(np.arange(KV_HEADS), HEADS // KV_HEADS)
    logits = np.einsum("qhd,khd->hqk", queries, keys[:, group]) / 3
    weights = np.where(np.asarray(seen)[None], np.exp(logits), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values[:, group])


def some():
    drawn = np.random.default_rng(0).random((SIZE, SIZE)) < 0.02
    return jnp.asarray(np.tril(drawn) | np.eye(SIZE, dtype=np.bool_))


@pytest.mark.parametrize("seen", [causal(SIZE), window(SIZE, 20, 4), some()])
def test_attention_is_softmax_over_what_is_seen(seen):
    attended = jax.jit(masked_attention, static_argnums=2)(heads(), seen, 1 / 3)
    np.testing.assert_allclose(attended, plain(heads(), seen), rtol=1e-5, atol=1e-5)


def test_a_window_is_as_many_positions_as_it_says():
    counts = np.asarray(window(64, 20, 4)).sum(axis=1)
    assert counts.tolist() == [min(at + 1, 20) for at in range(64)]
    assert np.asarray(window(64, 20, 4))[50].nonzero()[0].tolist() == [*range(4), *range(35, 51)]


def test_the_best_are_selected_and_ties_go_to_the_lowest():
    keys = jnp.asarray([[1.0], [3.0], [2.0], [3.0], [3.0]])
    seen = selected(jnp.ones((5, 1, 1)), keys, jnp.ones((5, 1)), 2)
    chosen = [np.flatnonzero(row).tolist() for row in np.asarray(seen)]
    assert chosen == [[0], [0, 1], [1, 2], [1, 3], [1, 3]]
