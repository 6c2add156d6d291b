"""Small drafts of every kind, with random weights everywhere, for a target of width 32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.models.draft.block import Vocabulary
from dhisparse_jax.models.draft.checkpoint import build_draft, make_draft
from dhisparse_jax.models.draft.config import DraftConfig, MarkovConfig, SelectorConfig
from dhisparse_jax.models.params import params_of

WIDTH, VOCABULARY, TAPS = 32, 64, (0, 2)

BASE = DraftConfig(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    target_hidden_size=WIDTH,
    target_layers=4,
    taps=TAPS,
    mask_token_id=VOCABULARY - 1,
    block_size=4,
    anchor_first=False,
    windows=(6, 6),
    causal=(False, False),
    rope_theta=1e3,
    param_dtype="float32",
)
CONFIGS = {
    "dflash": BASE,
    "dflash2": dataclasses.replace(BASE, selector=SelectorConfig(rank=8, top_k=5, conv_group=8)),
    "dspark": dataclasses.replace(
        BASE, anchor_first=True, block_size=3, markov=MarkovConfig(rank=8, kind="vanilla")
    ),
    "gated": dataclasses.replace(BASE, markov=MarkovConfig(rank=8, kind="gated")),
    "rnn": dataclasses.replace(
        BASE,
        anchor_first=True,
        markov=MarkovConfig(rank=8, kind="rnn", confidence_with_markov=False),
    ),
}


def noisy(params, seed=1):
    """Weights with noise on all of them, also on those that start at zero or one."""
    rng = np.random.default_rng(seed)
    move = lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype)
    return jax.tree.map(move, params)


@functools.cache
def weights(name, seed=1):
    """Nested weights of one of CONFIGS."""
    return noisy(params_of(make_draft(CONFIGS[name], jnp.float32)), seed)


def draft(name, **changes):
    """Configuration and model; changes must leave the weights' shapes as they are."""
    config = dataclasses.replace(CONFIGS[name], **changes)
    return config, build_draft(config, weights(name), jnp.float32)


@functools.cache
def vocabulary():
    rng = np.random.default_rng(7)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return Vocabulary(make(VOCABULARY, WIDTH), make(WIDTH, VOCABULARY))


def random_text(batch, length, seed=0):
    """Tokens, and features of every position."""
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY - 1, (batch, length)), jnp.int32)
    features = rng.normal(size=(batch, length, len(TAPS) * WIDTH))
    return tokens, jnp.asarray(features, jnp.float32)
