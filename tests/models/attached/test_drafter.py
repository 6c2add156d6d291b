"""The drafters against a second model in NumPy float64, and the ring that they keep."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.hierarchy.formats import stored_rows
from dhisparse_jax.sampling import greedy
from tests.fixtures.make_v41_fixture import make_tokenizer, text_words
from tests.support import numpy_v41, small_v41
from tests.support.small_attached import (
    BLOCKS,
    KINDS,
    drafter,
    expected,
    random_features,
    small,
)

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


@pytest.mark.parametrize("kind", [pytest.param("v4", marks=pytest.mark.slow), "v41"])
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


def test_the_fixture_is_what_the_numpy_model_says():
    """Features of the target's own text; the file is what the script made."""
    own, params = drafter("v41")
    words = text_words(make_tokenizer())
    trace = numpy_v41.model(small_v41.TEXT, small_v41.weights(), small_v41.TOKENS, words)
    features = np.concatenate([trace.features[layer] for layer in own.taps], axis=-1)
    count = len(BLOCKS["positions"])
    given = jnp.broadcast_to(jnp.asarray(features, jnp.float32), (count, *features.shape))
    state = committed("v41", given, BLOCKS["positions"])
    anchors, lengths = (jnp.asarray(BLOCKS[n], jnp.int32) for n in ("anchors", "positions"))
    got = functions("v41")[1](params, state, anchors, lengths, greedy(count))
    assert np.array_equal(got.tokens, BLOCKS["tokens"])
    assert np.abs(got.confidence - BLOCKS["confidence"]).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_ring_is_the_full_history_with_its_window(kind):
    """Whatever was accepted per step; rows of rejected tokens are not even read."""
    own, params = drafter(kind)
    commit, propose, _ = functions(kind)
    rng, longest = np.random.default_rng(0), 30
    features = np.asarray(random_features(kind, 6, longest, seed=1))
    state, lengths = own.init(6), np.zeros(6, np.int32)
    width = own.config.block_size + 1
    while (lengths < longest - width).any():
        count = rng.integers(0, width + 1, 6).astype(np.int32)
        count[lengths >= longest - width] = 0
        new = np.full((6, longest, features.shape[2]), np.nan, np.float32)
        for row in range(6):
            new[row, : count[row]] = features[row, lengths[row] :][: count[row]]
        state = commit(params, state, jnp.asarray(new), jnp.asarray(lengths), jnp.asarray(count))
        lengths += count
        assert np.array_equal(state.next, lengths)
    anchors = jnp.arange(6, dtype=jnp.int32)
    got = propose(params, state, anchors, jnp.asarray(lengths), greedy(6))
    for row, length in enumerate(lengths):
        block = expected(kind, features[row, :length], row)
        assert got.tokens[row].tolist() == block.tokens
        assert np.abs(got.confidence[row] - block.confidence).max() < 1e-5


def test_a_row_that_joins_knows_nothing_of_the_one_before():
    own, params = drafter("v41")
    features = random_features("v41", len(LENGTHS), max(LENGTHS))
    state = own.reset(committed("v41", features, LENGTHS), jnp.int32(5))
    anchors, lengths = jnp.full(6, 7, jnp.int32), jnp.asarray((*LENGTHS[:5], 0), jnp.int32)
    got = functions("v41")[1](params, state, anchors, lengths, greedy(6))
    block = expected("v41", np.zeros((0, features.shape[2])), 7)
    assert got.tokens[5].tolist() == block.tokens
    assert np.abs(got.confidence[5] - block.confidence).max() < 1e-5


@pytest.mark.parametrize("kind", [pytest.param("v4", marks=pytest.mark.slow), "v41"])
def test_sampled_proposals_have_the_distribution_that_they_say(kind):
    """q is the softmax of the logits that know the token drawn before."""
    own, params = drafter(kind)
    features = random_features(kind, 6, max(LENGTHS))
    state = committed(kind, features, LENGTHS)
    lengths, anchors = jnp.asarray(LENGTHS, jnp.int32), jnp.arange(6, dtype=jnp.int32)
    sampler = dataclasses.replace(greedy(6), temperature=jnp.full(6, 0.7))
    got = functions(kind)[1](params, state, anchors, lengths, sampler)
    assert np.abs(np.asarray(got.probabilities).sum(-1) - 1).max() < 1e-5
    weights, last = small(kind).weights, f"mtp.{own.config.stages - 1}.markov_head"
    _, normed = functions(kind)[2](params, state, anchors, lengths)
    before = np.concatenate([np.asarray(anchors)[:, None], got.tokens[:, :-1]], axis=1)
    bias = weights[f"{last}.markov_w1.weight"][before] @ weights[f"{last}.markov_w2.weight"].T
    logits = (np.asarray(normed) @ np.asarray(params["head"]) + bias) / 0.7
    q = np.exp(logits - logits.max(-1, keepdims=True))
    assert np.abs(q / q.sum(-1, keepdims=True) - got.probabilities).max() < 1e-5


@pytest.mark.slow
def test_fewer_proposals_are_the_first_ones_of_the_whole_block():
    whole, params = drafter("v41")
    short, _ = drafter("v41", 2)
    features = random_features("v41", len(LENGTHS), max(LENGTHS))
    state = committed("v41", features, LENGTHS)
    given = (params, state, jnp.arange(6, dtype=jnp.int32), jnp.asarray(LENGTHS, jnp.int32))
    got = jax.jit(short.propose)(*given, greedy(6))
    every = functions("v41")[1](*given, greedy(6))
    assert got.tokens.shape == (6, 2) == (6, short.length)
    assert np.array_equal(got.tokens, every.tokens[:, :2])
    assert whole.length == 4


@pytest.mark.parametrize(("kind", "form", "words"), [("v4", "fp8", 8), ("v41", "fp4", 6)])
def test_the_ring_is_kept_in_the_format_of_the_windows(kind, form, words):
    """Rounded as the target's rows are, those of the block too."""
    exact, params = drafter(kind)
    own = dataclasses.replace(exact, target=dataclasses.replace(exact.target, kv_format=form))
    features = random_features(kind, len(LENGTHS), max(LENGTHS))
    start, count = jnp.zeros(6, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
    state = jax.jit(own.commit)(params, own.init(6), features, start, count)
    assert (own.row.words, state.keys.shape[-1]) == (words, 8)  # whole 16 bytes
    plain = np.asarray(committed(kind, features, LENGTHS).keys).view(np.float32)
    full = slice(LENGTHS.index(5), None)  # rings without an empty slot
    rows = stored_rows(own.row, jnp.asarray(plain[full]))
    assert np.array_equal(state.keys[full][..., :words], rows)
    given = (params, jnp.arange(6, dtype=jnp.int32), count)
    _, normed = jax.jit(own.block)(given[0], state, *given[1:])
    _, expected = functions(kind)[2](given[0], committed(kind, features, LENGTHS), *given[1:])
    assert 1e-4 < np.median(np.abs(normed - expected)) < 0.05  # other experts are far apart
