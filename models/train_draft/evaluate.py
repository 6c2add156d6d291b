"""Accept lengths on left-out modules: the target continues them greedily, the draft guesses along.

Greedy verification accepts exactly the proposals that equal the target's own continuation. So that
continuation is made once, every position of it is tried as an anchor at once, and the steps that
decoding would take are walked through afterwards.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt8

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.draft.block import run_blocks
from dhisparse_jax.models.draft.checkpoint import build_draft
from dhisparse_jax.models.draft.proposal import picker, propose
from dhisparse_jax.models.params import Nested, build_model
from dhisparse_jax.models.train.corpus import SEPARATOR
from dhisparse_jax.models.train_draft.config import DraftTrainConfig
from dhisparse_jax.models.train_draft.step import read_texts, vocabulary_of
from dhisparse_jax.sampling import greedy


class Accepted(NamedTuple):
    """What decoding would have accepted.

    Attributes:
        length: Mean tokens per step: accepted proposals, and one more.
        by_position: Part of the steps in which proposal i and all before it were accepted.
        steps: Decoding steps behind these figures.
    """

    length: float
    by_position: list[float]
    steps: int


def evaluation_texts(
    files: Mapping[str, bytes], *, context: int, stride: int, batch: int
) -> UInt8[np.ndarray, "n s"]:
    """Pieces of the files, the first of each with the separator that starts a text.

    Half a piece is the prompt. The number of pieces is made a multiple of `batch` by dropping some.
    """
    pieces = []
    for text in files.values():
        stream = bytes([SEPARATOR]) + text
        starts = range(0, max(1, len(stream) - context), stride)
        pieces.extend(stream[start : start + context].ljust(context, b" ") for start in starts)
    kept = max(len(pieces) // batch, 1) * batch
    pieces = (pieces * batch)[:kept]
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(kept, context)


def accepted_counts(
    config: DraftTrainConfig,
    target: GlmConfig,
    weights: Nested,
    params: Nested,
    tokens: UInt8[Array, "n s"],
) -> Int[Array, "n a"]:
    """Accepted proposals with the anchor at every position of the second half of each text."""
    draft = config.draft
    dtype = jnp.dtype(config.compute_dtype)
    model, glm = build_draft(draft, params, dtype), build_model(target, weights, dtype)
    length = tokens.shape[1]
    anchors = jnp.arange(length // 2 - 1, length - 1 - draft.length, dtype=jnp.int32)

    def part(tokens: jax.Array) -> jax.Array:
        text = tokens.astype(jnp.int32)
        at = jnp.broadcast_to(anchors[None], (len(text), len(anchors)))
        read = read_texts(glm, draft.taps, text, jnp.zeros(len(text), jnp.int32))
        rows = run_blocks(model, draft, vocabulary_of(glm), read.features, text, at)
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        count = at.size
        pick = picker(greedy(count), flat(at))
        first = flat(jnp.take_along_axis(text, at, axis=1))
        guess = propose(model, draft, flat(rows.hidden), flat(rows.logits), first, pick)
        index = flat(at)[:, None] + 1 + jnp.arange(draft.length, dtype=jnp.int32)[None]
        owner = jnp.repeat(jnp.arange(len(text)), len(anchors))[:, None]
        right = (guess.tokens == text[owner, index]).astype(jnp.int32)
        return jnp.sum(jnp.cumprod(right, axis=1), axis=1).reshape(at.shape)

    parts = tokens.reshape(-1, config.eval_batch, length)
    return lax.map(part, parts).reshape(len(tokens), -1)


def walk(counts: Int[np.ndarray, "n a"], length: int) -> Accepted:
    """The steps of decoding every text from its first anchor to its last."""
    taken = []
    for row in counts:
        at = 0
        while at < len(row):
            taken.append(int(row[at]))
            at += taken[-1] + 1
    steps = np.array(taken)
    return Accepted(
        length=float(steps.mean() + 1),
        by_position=[float((steps > i).mean()) for i in range(length)],
        steps=len(steps),
    )
