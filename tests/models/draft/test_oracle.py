"""The drafts equal a second model that was written from the formulas, in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.draft.block import run_blocks
from dhisparse_jax.models.draft.hf import _ours, _published
from dhisparse_jax.models.draft.proposal import picker, propose
from dhisparse_jax.models.params import flatten
from dhisparse_jax.sampling import Sampler, greedy
from tests.support.numpy_draft import NumpyDraft, softmax
from tests.support.small_draft import CONFIGS, draft, random_text, vocabulary, weights

LENGTH, ANCHOR = 13, 9


def published(name):
    return {_published(n): _ours(n, np.asarray(x)) for n, x in flatten(weights(name)).items()}


def oracle(config, name):
    return NumpyDraft(config, published(name), *vocabulary())


def rows_of(model, config, tokens, features, anchor=ANCHOR):
    anchors = jnp.full((len(tokens), 1), anchor, jnp.int32)
    rows = run_blocks(model, config, vocabulary(), features, tokens, anchors)
    return rows.hidden[:, 0], rows.logits[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": (None, 5), "causal": (False, True)},
        {"windows": (2, 7), "causal": (True, False), "input_scale": 3.0},
    ],
    ids=["windows", "full-and-causal", "narrow-and-scaled"],
)
def test_blocks_equal_the_formulas(name, changes):
    config, model = draft(name, **changes)
    tokens, features = random_text(1, LENGTH)
    hidden, logits = rows_of(model, config, tokens, features)
    expected = oracle(config, name).block(int(tokens[0, ANCHOR]), ANCHOR, np.asarray(features[0]))
    np.testing.assert_allclose(hidden[0], np.stack(expected[0]), atol=2e-4)
    np.testing.assert_allclose(logits[0], np.stack(expected[1]), atol=1e-3)


def forced(number):
    """Chooses a fixed rank, so that the walk does not depend on near ties."""
    order = iter(number)

    def choose(scores):
        return int(np.argsort(-scores, kind="stable")[next(order)]), softmax(scores)

    return choose


def pick_rank(number):
    def pick(scores, at):
        index = jnp.argsort(-scores, axis=-1, stable=True)[:, number[at]].astype(jnp.int32)
        return index, jax.nn.softmax(scores, axis=-1)

    return pick


@pytest.mark.parametrize("name", ["dflash2", "dspark", "gated", "rnn"])
def test_proposals_and_their_q_equal_the_formulas(name):
    changes = {"output_multiplier": 0.3, "logit_softcap": 9.0}
    config, model = draft(name, **changes)
    tokens, features = random_text(1, LENGTH, seed=3)
    hidden, logits = rows_of(model, config, tokens, features)
    ranks = [1, 0, 2, 1][: config.length]
    assert len(ranks) == config.length
    anchor = tokens[:, ANCHOR]
    got = propose(model, config, hidden, logits, anchor, pick_rank(ranks))
    reference = oracle(config, name)
    block = reference.block(int(anchor[0]), ANCHOR, np.asarray(features[0]))
    walk = reference.selector_walk if name == "dflash2" else reference.markov_walk
    expected, qs, *confidence = walk(int(anchor[0]), *block, forced(ranks))
    assert np.asarray(got.tokens[0]).tolist() == expected
    for i, q in enumerate(qs):
        ids = np.asarray(got.candidates[0, i])
        np.testing.assert_allclose(got.probabilities[0, i], [q[t] for t in ids], atol=2e-4)
    if confidence:
        np.testing.assert_allclose(got.confidence[0], confidence[0], atol=2e-4)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_q_is_what_was_drawn_from(name):
    """Tokens drawn many times over have the frequencies of q; greedy rows have one-hot q."""
    config, model = draft(name)
    count = 4000
    tokens, features = random_text(1, LENGTH, seed=5)
    hidden, logits = rows_of(model, config, tokens, features)
    repeat = lambda x: jnp.broadcast_to(x, (count, *x.shape[1:]))
    sampler = Sampler(
        temperature=jnp.full(count, 1.5, jnp.float32).at[0].set(0.0),
        top_k=jnp.zeros(count, jnp.int32),
        top_p=jnp.ones(count, jnp.float32),
        key=jax.random.split(jax.random.key(1), count),
    )
    length = jnp.full(count, ANCHOR, jnp.int32)
    anchor = repeat(tokens[:, ANCHOR])
    got = propose(model, config, repeat(hidden), repeat(logits), anchor, picker(sampler, length))
    alone = propose(model, config, hidden, logits, anchor[:1], picker(greedy(1), length[:1]))
    np.testing.assert_array_equal(got.tokens[0], alone.tokens[0])
    np.testing.assert_array_equal(got.probabilities[0], alone.probabilities[0])
    assert set(np.unique(alone.probabilities)) <= {0.0, 1.0}
    first = got.probabilities[1, 0]
    drawn = np.asarray(got.tokens[1:, 0])
    frequency = [(drawn == t).mean() for t in np.asarray(got.candidates[1, 0])]
    np.testing.assert_allclose(frequency, first, atol=0.03)
    np.testing.assert_allclose(np.sum(got.probabilities, axis=-1), 1.0, atol=1e-5)
    chosen = got.candidates == got.tokens[..., None]
    assert (np.sum(np.where(chosen, got.probabilities, 0), axis=-1) > 0).all()
