"""What a draft minimises, as published: cross-entropy, the selector's, and DSpark's three terms.

Proposal n of a block (from 0) is for the token at `anchor + 1 + n`, whatever the layout of the
block; the token before it is known in training ("teacher-forced"). Far proposals count less, since
they matter only when all nearer ones were accepted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.draft.backbone import DraftModel
from dhisparse_jax.models.draft.block import Rows
from dhisparse_jax.models.draft.config import DraftConfig
from dhisparse_jax.models.draft.dflash2 import bound_logits, take_candidates
from dhisparse_jax.models.draft.dspark import teacher_forced

# DSpark's weights of cross-entropy, of the distance to the target, and of the confidence.
_CROSS_ENTROPY, _DISTANCE, _CONFIDENCE = 0.1, 0.9, 1.0


class Truth(NamedTuple):
    """What the rows of each block should have said.

    Attributes:
        labels: The token that each proposal is for.
        previous: The token before it.
        target: The target's logits for it; used by DSpark only.
    """

    labels: Int[Array, "b a n"]
    previous: Int[Array, "b a n"]
    target: Float[Array, "b a n vocab"]


class Losses(NamedTuple):
    """Scalars of one step.

    Attributes:
        total: What is minimised.
        cross_entropy: Of the proposals' logits, weighted.
        head: The selector's cross-entropy, or the confidence's; 0 for DFlash.
        first: Part of the first proposals that are right.
        chain: Mean length of the right beginning of a block, with known predecessors.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    head: Float[Array, ""]
    first: Float[Array, ""]
    chain: Float[Array, ""]


def block_losses(
    model: DraftModel, config: DraftConfig, rows: Rows, truth: Truth, decay: float
) -> Losses:
    """The losses of one batch of blocks.

    Args:
        model: the draft, for its heads.
        config: its sizes.
        rows: from `models.draft.block.run_blocks`.
        truth: what they should have said.
        decay: proposal n has weight `exp(-n / decay)`.
    """
    number = jnp.arange(truth.labels.shape[-1], dtype=jnp.float32)
    weights = jnp.broadcast_to(jnp.exp(-number / decay)[None, None], truth.labels.shape)
    match config.kind:
        case "dflash":
            logits = bound_logits(rows.logits, config)
            loss = _mean(_cross_entropy(logits, truth.labels), weights)
            return _losses(loss, loss, jnp.float32(0), jnp.argmax(logits, -1), truth)
        case "dflash2":
            return _selector_losses(model, config, rows, truth, weights)
        case "dspark":
            return _markov_losses(model, config, rows, truth, weights)


def _selector_losses(
    model: DraftModel, config: DraftConfig, rows: Rows, truth: Truth, weights: jax.Array
) -> Losses:
    """DFlash's loss, plus cross-entropy over the candidates where the truth is one of them."""
    assert config.selector is not None and model.candidate_selector is not None
    plain = _mean(_cross_entropy(bound_logits(rows.logits, config), truth.labels), weights)
    ids, unary = take_candidates(rows.logits, config, config.selector)
    pairs = model.candidate_selector.pair_scores(rows.hidden, truth.previous[..., None], ids)
    scores = unary + pairs[..., 0, :]
    match = ids == truth.labels[..., None]
    kept = jnp.where(jnp.any(match, axis=-1), weights, 0.0)
    head = _mean(_cross_entropy(scores, jnp.argmax(match, axis=-1)), kept)
    best = jnp.take_along_axis(ids, jnp.argmax(scores, -1)[..., None], axis=-1)[..., 0]
    return _losses(plain + head, plain, head, best, truth)


def _markov_losses(
    model: DraftModel, config: DraftConfig, rows: Rows, truth: Truth, weights: jax.Array
) -> Losses:
    """Cross-entropy, distance to the target's distribution, and the confidence's cross-entropy."""
    assert model.markov_head is not None
    corrected = teacher_forced(
        model.markov_head,
        model.confidence_head,
        bound_logits(rows.logits, config),
        rows.hidden,
        truth.previous,
    )
    plain = _mean(_cross_entropy(corrected.logits, truth.labels), weights)
    p = jax.nn.softmax(truth.target, axis=-1)
    apart = jnp.sum(jnp.abs(jax.nn.softmax(corrected.logits, axis=-1) - p), axis=-1)
    total = _CROSS_ENTROPY * plain + _DISTANCE * _mean(apart, weights)
    head = jnp.float32(0)
    if model.confidence_head is not None:
        chance = jax.lax.stop_gradient(1 - apart / 2)
        head = _mean(optax.sigmoid_binary_cross_entropy(corrected.confidence, chance), weights)
    total = total + _CONFIDENCE * head
    return _losses(total, plain, head, jnp.argmax(corrected.logits, -1), truth)


def _losses(
    total: jax.Array, plain: jax.Array, head: jax.Array, best: jax.Array, truth: Truth
) -> Losses:
    """With the figures that show how training goes."""
    right = (best == truth.labels).astype(jnp.float32)
    chain = jnp.mean(jnp.sum(jnp.cumprod(right, axis=-1), axis=-1))
    return Losses(total, plain, head, jnp.mean(right[..., 0]), chain)


def _cross_entropy(
    logits: Float[Array, "b a n m"], labels: Int[Array, "b a n"]
) -> Float[Array, "b a n"]:
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _mean(values: Float[Array, "b a n"], weights: Float[Array, "b a n"]) -> Float[Array, ""]:
    """Weighted mean; 0 where nothing has weight."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
