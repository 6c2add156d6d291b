"""What must hold between the drafts, and of their blocks, whatever the weights are."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.draft.block import run_blocks
from dhisparse_jax.models.draft.checkpoint import build_draft, make_draft
from dhisparse_jax.models.draft.proposal import picker, propose
from dhisparse_jax.models.params import flatten, params_of, unflatten
from dhisparse_jax.sampling import greedy
from tests.support.small_draft import CONFIGS, draft, random_text, vocabulary, weights

ANCHORS = jnp.asarray([[3, 9, 12], [1, 7, 10]], jnp.int32)


def blocks(model, config, tokens, features, anchors=ANCHORS):
    return run_blocks(model, config, vocabulary(), features, tokens, anchors)


def guess(model, config, rows, tokens, anchors=ANCHORS):
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    first = flat(jnp.take_along_axis(tokens, anchors, axis=1))
    pick = picker(greedy(len(first)), flat(anchors))
    return propose(model, config, flat(rows.hidden), flat(rows.logits), first, pick)


def with_weights_of(name, config):
    """A fresh draft of `config`, with the weights that it shares with another one."""
    fresh = params_of(make_draft(config, jnp.float32))
    flat = flatten(fresh) | {
        key: value for key, value in flatten(weights(name)).items() if key in flatten(fresh)
    }
    return build_draft(config, unflatten(flat, fresh), jnp.float32)


@pytest.mark.parametrize(
    ("name", "plain", "changes"),
    [
        ("dflash2", CONFIGS["dflash"], {}),
        ("dspark", dataclasses.replace(CONFIGS["dspark"], markov=None), {}),
        ("dflash2", CONFIGS["dflash"], {"logit_softcap": 5.0, "output_multiplier": 0.2}),
    ],
    ids=["dflash2", "dspark", "dflash2-bounded"],
)
def test_fresh_heads_change_nothing(name, plain, changes):
    """Identity convolutions and a zero codebook, or a zero Markov matrix: bit for bit DFlash."""
    config = dataclasses.replace(CONFIGS[name], **changes)
    tokens, features = random_text(2, 16)
    model, base = with_weights_of("dflash", config), with_weights_of("dflash", plain)
    rows, expected = blocks(model, config, tokens, features), blocks(base, plain, tokens, features)
    np.testing.assert_array_equal(rows.hidden, expected.hidden)
    np.testing.assert_array_equal(rows.logits, expected.logits)
    np.testing.assert_array_equal(
        guess(model, config, rows, tokens).tokens, guess(base, plain, expected, tokens).tokens
    )


@pytest.mark.parametrize("name", ["dflash2", "rnn"])
def test_heads_with_weights_change_something(name):
    config, model = draft(name)
    tokens, features = random_text(2, 16)
    rows = blocks(model, config, tokens, features)
    best = jnp.argmax(rows.logits, axis=-1).reshape(-1, config.length)
    assert (guess(model, config, rows, tokens).tokens != best).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_reads_its_anchor_and_features_before_it_only(name):
    config, model = draft(name)
    tokens, features = random_text(2, 16)
    other, noise = random_text(2, 16, seed=9)
    rows = blocks(model, config, tokens, features)
    # Another block of the same sequence, and everything from an anchor on, features included.
    moved = ANCHORS.at[:, 1:].set(jnp.asarray([[4, 14], [2, 15]]))
    after = jnp.arange(16)[None] >= ANCHORS[:, :1]
    is_anchor = jnp.arange(16)[None] == ANCHORS[:, :1]
    changed = blocks(
        model,
        config,
        jnp.where(is_anchor, tokens, other),
        jnp.where(after[..., None], noise, features),
        moved,
    )
    np.testing.assert_array_equal(changed.logits[:, 0], rows.logits[:, 0])
    before = jnp.arange(16)[None] == ANCHORS[:, :1] - 1
    seen = blocks(model, config, tokens, jnp.where(before[..., None], noise, features))
    assert (seen.logits[:, 0] != rows.logits[:, 0]).any(axis=-1).all()
