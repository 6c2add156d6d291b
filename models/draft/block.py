"""Draft blocks: which rows they have, what the rows see, and what the target's head says of them.

Once over a whole sequence with many anchors, for training and evaluation; once over the draft ring,
for decoding. Both run `DraftModel.hidden` on the same rows.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.models.draft.backbone import DraftModel
from dhisparse_jax.models.draft.config import DraftConfig
from pallas_kernels.draft_attention.reference import attend_block
from pallas_kernels.draft_attention.types import KeysValues, Seen


class Rows(NamedTuple):
    """The rows that propose, in order: their state after the last norm, and raw target logits."""

    hidden: Float[Array, "b a n d"]
    logits: Float[Array, "b a n vocab"]


class Vocabulary(NamedTuple):
    """Embedding and head that the draft uses, those of the target or its own."""

    embedding: Float[Array, "vocab d"]
    head: Float[Array, "d vocab"]


def block_positions(config: DraftConfig, anchors: Int[Array, "b a"]) -> Int[Array, "b a t"]:
    """Absolute position of every row, for anchors at the given positions."""
    return anchors[..., None] + jnp.arange(config.block_size, dtype=jnp.int32)[None, None]


def embed_rows(
    config: DraftConfig, vocabulary: Vocabulary, tokens: Int[Array, "b a"]
) -> Float[Array, "b a t d"]:
    """Embeddings of `[anchor, MASK, MASK, ...]`."""
    masks = jnp.full((*tokens.shape, config.block_size - 1), config.mask_token_id, jnp.int32)
    rows = jnp.concatenate((tokens[..., None].astype(jnp.int32), masks), axis=-1)
    embedded = vocabulary.embedding[rows]
    return embedded if config.input_scale == 1.0 else embedded * config.input_scale


def block_seen(config: DraftConfig, layer: int) -> Bool[Array, "t t"]:
    """Which rows of its block each row sees."""
    row = jnp.arange(config.block_size)
    back = row[:, None] - row[None]
    seen = jnp.ones(back.shape, jnp.bool_)
    if config.causal[layer]:
        seen &= back >= 0
    window = config.windows[layer]
    return seen if window is None else seen & (back < window)


def sequence_seen(config: DraftConfig, anchors: Int[Array, "b a"], length: int) -> tuple[Seen, ...]:
    """What blocks see of the sequence they stand in: positions before the anchor, in the window."""
    key = jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, -1)
    back = block_positions(config, anchors)[..., None] - key
    before = key < anchors[..., None, None]
    context = {
        window: jnp.broadcast_to(before, back.shape) if window is None else before & (back < window)
        for window in set(config.windows)
    }
    return tuple(
        Seen(context[window], block_seen(config, layer))
        for layer, window in enumerate(config.windows)
    )


def run_blocks(
    model: DraftModel,
    config: DraftConfig,
    vocabulary: Vocabulary,
    features: Float[Array, "b s taps"],
    tokens: Int[Array, "b s"],
    anchors: Int[Array, "b a"],
) -> Rows:
    """Blocks at many anchors of whole sequences that start at position 0.

    Args:
        model: the draft.
        config: its sizes.
        vocabulary: embedding and head.
        features: the target's hidden states at the tapped layers, concatenated.
        tokens: the sequences; only the anchors' are read.
        anchors: int32 positions. A block reads features of positions before its anchor only.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    keys, values = model.context(features, positions)
    rows = embed_rows(config, vocabulary, jnp.take_along_axis(tokens, anchors, axis=1))
    attends = [
        partial(attend_block, context=KeysValues(keys[:, layer], values[:, layer]), seen=seen)
        for layer, seen in enumerate(sequence_seen(config, anchors, tokens.shape[1]))
    ]
    hidden = model.hidden(rows, block_positions(config, anchors), attends)
    return propose_rows(config, vocabulary, hidden)


def propose_rows(
    config: DraftConfig, vocabulary: Vocabulary, hidden: Float[Array, "b a t d"]
) -> Rows:
    """The rows that propose, without the anchor's where that predicts itself."""
    hidden = hidden if config.anchor_first else hidden[:, :, 1:]
    head = vocabulary.head.astype(hidden.dtype)
    logits = jnp.einsum("band,dv->banv", hidden, head, preferred_element_type=jnp.float32)
    return Rows(hidden, logits)
