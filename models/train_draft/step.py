"""Training steps as pure functions: a chunk of rounds in one dispatch.

In a round the target reads a batch of sequences once; then several optimizer steps train the draft
on parts of it, with many blocks in every sequence.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key, UInt8

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.draft.block import Vocabulary, run_blocks
from dhisparse_jax.models.draft.checkpoint import build_draft
from dhisparse_jax.models.glm.dense import Sparse, run_layers
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.params import Nested, build_model
from dhisparse_jax.models.train.step import adamw
from dhisparse_jax.models.train_draft.config import DraftTrainConfig
from dhisparse_jax.models.train_draft.losses import Losses, Truth, block_losses


class DraftState(NamedTuple):
    """Float32 weights and the optimizer's moments."""

    params: Nested
    moments: optax.OptState


class Texts(NamedTuple):
    """Sequences to train on, and where the target's own continuation begins in each."""

    tokens: UInt8[Array, "n s"]
    prefix: Int[Array, " n"]


class Read(NamedTuple):
    """A batch of sequences after the target has read it.

    Attributes:
        tokens: the sequences.
        prefix: where the continuation begins.
        features: hidden states at the tapped layers.
        last: hidden states after the last layer.
    """

    tokens: Int[Array, "b s"]
    prefix: Int[Array, " b"]
    features: Float[Array, "b s taps"]
    last: Float[Array, "b s d"]


Chunk = Callable[[DraftState, Nested, Texts, Key[Array, ""], ArrayLike], tuple[DraftState, Losses]]


def rate_at(config: DraftTrainConfig, fraction: float) -> np.float32:
    """Learning rate when `fraction` of the run is done."""
    warm = min(1.0, (fraction + 1e-3) / config.warmup) if config.warmup else 1.0
    return np.float32(config.rate * warm * (1 + math.cos(math.pi * min(fraction, 1.0))) / 2)


def draft_optimizer(config: DraftTrainConfig) -> optax.GradientTransformation:
    """AdamW without the learning rate."""
    return adamw(config.adam_decays, config.max_gradient_norm, config.weight_decay)


def vocabulary_of(target: GlmModel) -> Vocabulary:
    """The target's embedding and head."""
    return Vocabulary(target.embedding[...], target.head.kernel[...])


def read_texts(
    target: GlmModel, taps: tuple[int, ...], tokens: Int[Array, "b s"], prefix: Int[Array, " b"]
) -> Read:
    """What the target makes of sequences, as it does when it is served."""
    attend = Sparse(target.config.index_top_k, chunk=tokens.shape[1])
    features = run_layers(target, tokens, attend, taps=taps)
    return lax.stop_gradient(Read(tokens, prefix, features.taps, features.h))


def draw_anchors(
    config: DraftTrainConfig, prefix: Int[Array, " b"], length: int, key: Key[Array, ""]
) -> Int[Array, "b a"]:
    """Positions of blocks: most in the continuation, the others anywhere; labels stay inside."""
    last = length - 1 - config.draft.length
    where, which = jax.random.split(key)
    shape = (len(prefix), config.anchors)
    own = jax.random.uniform(which, shape) < config.continued_share
    # The last prefix byte is an anchor too: the token after it is the target's.
    low = jnp.where(own, jnp.clip(prefix - 1, 1, last)[:, None], 1)
    spread = jax.random.uniform(where, shape) * (last + 1 - low).astype(jnp.float32)
    return jnp.minimum(low + spread.astype(jnp.int32), last)


def block_truth(read: Read, target: GlmModel, anchors: Int[Array, "b a"], count: int) -> Truth:
    """Labels, the tokens before them, and the target's logits for them."""
    at = anchors[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None]
    take = lambda x, index: jax.vmap(lambda row, i: row[i])(x, index)
    return Truth(
        labels=take(read.tokens, at + 1),
        previous=take(read.tokens, at),
        target=take(target.logits(read.last), at),
    )


def draft_loss(
    config: DraftTrainConfig, target: GlmModel, params: Nested, read: Read, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Losses]:
    """The loss of one step, and its parts."""
    draft = config.draft
    model = build_draft(draft, params, jnp.dtype(config.compute_dtype))
    anchors = draw_anchors(config, read.prefix, read.tokens.shape[1], key)
    rows = run_blocks(model, draft, vocabulary_of(target), read.features, read.tokens, anchors)
    truth = block_truth(read, target, anchors, draft.length)
    losses = block_losses(model, draft, rows, truth, config.decay)
    return losses.total, losses


def make_chunk(config: DraftTrainConfig, target: GlmConfig) -> Chunk:
    """Several rounds in one dispatch; gives the mean losses."""
    optimizer = draft_optimizer(config)
    compute = jnp.dtype(config.compute_dtype)

    def chunk(
        state: DraftState, weights: Nested, texts: Texts, key: jax.Array, rate: ArrayLike
    ) -> tuple[DraftState, Losses]:
        model = build_model(target, weights, compute)

        def step(state: DraftState, part: tuple[Read, jax.Array]) -> tuple[DraftState, Losses]:
            loss = lambda params: draft_loss(config, model, params, *part)
            gradient, losses = jax.grad(loss, has_aux=True)(state.params)
            with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
                updates, moments = optimizer.update(gradient, state.moments, state.params)
            params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
            return DraftState(params, moments), losses

        def read_round(state: DraftState, key: jax.Array) -> tuple[DraftState, Losses]:
            pick, steps = jax.random.split(key)
            chosen = jax.random.randint(pick, (config.sequences,), 0, len(texts.tokens))
            tokens = texts.tokens[chosen].astype(jnp.int32)
            read = read_texts(model, config.draft.taps, tokens, texts.prefix[chosen])
            parts = jax.tree.map(
                lambda x: x.reshape(config.steps_per_round, -1, *x.shape[1:]), read
            )
            return lax.scan(step, state, (parts, jax.random.split(steps, config.steps_per_round)))

        keys = jax.random.split(key, config.rounds_per_chunk)
        state, losses = lax.scan(read_round, state, keys)
        return state, jax.tree.map(jnp.mean, losses)

    return chunk
