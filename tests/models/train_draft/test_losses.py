"""Losses against their formulas in NumPy, and what they must not depend on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.draft.block import run_blocks
from dhisparse_jax.models.draft.checkpoint import build_draft
from dhisparse_jax.models.draft.config import MarkovConfig
from dhisparse_jax.models.train_draft.losses import Truth, block_losses
from tests.support.numpy_draft import sigmoid, softmax
from tests.support.small_draft import VOCABULARY, draft, random_text, vocabulary, weights

DECAY = 3.0
ANCHORS = jnp.asarray([[3, 9], [1, 7]], jnp.int32)


def setting(name, **changes):
    config, model = draft(name, **changes)
    tokens, features = random_text(2, 16)
    rows = run_blocks(model, config, vocabulary(), features, tokens, ANCHORS)
    at = np.asarray(ANCHORS)[..., None] + np.arange(config.length)
    take = lambda index: jnp.asarray(np.asarray(tokens)[np.arange(2)[:, None, None], index])
    target = np.random.default_rng(2).normal(size=(*at.shape, VOCABULARY)) * 2
    truth = Truth(take(at + 1), take(at), jnp.asarray(target, jnp.float32))
    return config, model, rows, truth


def over_blocks(config, truth, term):
    """Weighted mean of `term(block, n)`; None does not count."""
    total = weight = 0.0
    for block in np.ndindex(truth.labels.shape[:2]):
        for n in range(config.length):
            value = term(block, n)
            if value is not None:
                total += np.exp(-n / DECAY) * value
                weight += np.exp(-n / DECAY)
    return total / weight


def nats(logits, label):
    return -np.log(softmax(np.asarray(logits, np.float64))[label])


@pytest.mark.slow
def test_dflash_and_dflash2_minimise_the_published_sums():
    config, model, rows, truth = setting("dflash2")
    got = block_losses(model, config, rows, truth, DECAY)
    labels = np.asarray(truth.labels)
    logits = np.asarray(rows.logits)
    plain = over_blocks(config, truth, lambda b, n: nats(logits[b][n], labels[b][n]))
    selector = model.candidate_selector

    def head(block, n):
        ids = np.argsort(-logits[block][n], kind="stable")[: config.selector.top_k]
        if labels[block][n] not in ids:
            return None
        code = np.asarray(selector.predecessor_codebook[...])[
            truth.previous[block][n]
        ] * np.asarray(selector.hidden_projection(rows.hidden[block][n]))
        scores = logits[block][n][ids] + np.asarray(selector.successor_codebook[...])[ids] @ code
        return nats(scores, list(ids).index(labels[block][n]))

    expected = over_blocks(config, truth, head)
    np.testing.assert_allclose(got.cross_entropy, plain, rtol=1e-4)
    np.testing.assert_allclose(got.head, expected, rtol=1e-4)
    np.testing.assert_allclose(got.total, plain + expected, rtol=1e-4)
    base = dataclasses.replace(config, selector=None)
    np.testing.assert_allclose(
        block_losses(model, base, rows, truth, DECAY).total, plain, rtol=1e-4
    )


def test_labels_outside_the_candidates_do_not_count():
    config, model, rows, truth = setting("dflash2")
    worst = jnp.argmin(rows.logits, axis=-1).astype(jnp.int32)
    losses = block_losses(model, config, rows, truth._replace(labels=worst), DECAY)
    assert losses.head == 0
    np.testing.assert_allclose(losses.total, losses.cross_entropy)


def test_dspark_minimises_the_published_sums():
    config, model, rows, truth = setting("dspark")
    got = block_losses(model, config, rows, truth, DECAY)
    embedded = np.asarray(model.markov_head.markov_w1.weight[...])[np.asarray(truth.previous)]
    logits = np.asarray(rows.logits) + embedded @ np.asarray(
        model.markov_head.markov_w2.kernel[...]
    )
    labels, hidden = np.asarray(truth.labels), np.asarray(rows.hidden)
    proj = model.confidence_head.proj

    def apart(block, n):
        p, q = softmax(np.asarray(truth.target)[block][n]), softmax(logits[block][n])
        return np.abs(p - q).sum()

    def confidence(block, n):
        x = np.concatenate([hidden[block][n], embedded[block][n]])
        c = sigmoid(x @ np.asarray(proj.kernel[...])[:, 0] + np.asarray(proj.bias[...])[0])
        chance = 1 - apart(block, n) / 2
        return -(chance * np.log(c) + (1 - chance) * np.log(1 - c))

    plain = over_blocks(config, truth, lambda b, n: nats(logits[b][n], labels[b][n]))
    head = over_blocks(config, truth, confidence)
    np.testing.assert_allclose(got.cross_entropy, plain, rtol=1e-4)
    np.testing.assert_allclose(got.head, head, rtol=1e-3)
    total = 0.1 * plain + 0.9 * over_blocks(config, truth, apart) + head
    np.testing.assert_allclose(got.total, total, rtol=1e-3)


def test_the_confidence_does_not_teach_the_distribution():
    """Its target is cut off: the gradient on the Markov matrix is that of the other terms."""
    config, _, rows, truth = setting("dspark")
    params = weights("dspark")

    def gradient(config):
        names = {} if config.markov.confidence else {"confidence_head": None}
        kept = {key: value for key, value in params.items() if key not in names}

        def loss(matrix):
            head = kept["markov_head"] | {"markov_w2": {"kernel": matrix}}
            changed = build_draft(config, kept | {"markov_head": head}, jnp.float32)
            return block_losses(changed, config, rows, truth, DECAY).total

        return jax.grad(loss)(params["markov_head"]["markov_w2"]["kernel"])

    with_head = gradient(config)
    without = gradient(dataclasses.replace(config, markov=MarkovConfig(rank=8, confidence=False)))
    assert jnp.abs(without).max() > 1e-4
    np.testing.assert_allclose(with_head, without, atol=1e-6)


@pytest.mark.parametrize("name", ["dflash2", "dspark", "rnn"])
def test_a_row_knows_of_the_text_only_the_token_before_it(name):
    """Another label and predecessor of row 1 leave the losses of the rows before it alone."""
    config, model, rows, truth = setting(name)
    truth = truth._replace(labels=jnp.argmax(rows.logits, axis=-1).astype(jnp.int32))
    first = jax.jit(lambda truth: block_losses(model, config, rows, truth, 1e-3))
    other = truth._replace(
        labels=truth.labels.at[..., 1:].add(1), previous=truth.previous.at[..., 1:].add(1)
    )
    np.testing.assert_array_equal(first(truth).total, first(other).total)
    moved = truth._replace(previous=truth.previous.at[..., 0].add(1))
    assert first(truth).total != first(moved).total
