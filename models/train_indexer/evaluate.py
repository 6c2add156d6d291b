"""Perplexity of a text, teacher forced, by what the model's layers are let attend to."""

from typing import Literal

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.glm.attend import map_query_chunks
from dhisparse_jax.models.llama.attend import causal, window
from dhisparse_jax.models.llama.indexers import FittedIndexers, selecting
from dhisparse_jax.models.llama.model import LlamaModel
from dhisparse_jax.models.llama.whole import Look, run_layers
from dhisparse_jax.models.train.losses import token_losses

Mode = Literal["dense", "indexer", "window"]

SINKS = 4
"""First positions that a window keeps beside the newest ones (StreamingLLM, arXiv 2309.17453)."""

_CHUNK = 512
"""Positions whose logits are there at once."""


def look_for(mode: Mode, count: int, length: int, indexers: FittedIndexers) -> Look:
    """What layers attend to: everything, or `count` positions."""
    match mode:
        case "dense":
            seen = causal(length)
        case "window":
            seen = window(length, count, SINKS)
        case "indexer":
            return selecting(indexers, count)
    return lambda view: seen


def text_losses(
    model: LlamaModel, tokens: Int[Array, " s"], look: Look
) -> Float[Array, " predicted"]:
    """Cross-entropy of every token but the first, in nats."""
    hidden = run_layers(model, tokens, look)
    return _losses(model, hidden[:-1], tokens[1:])


@nnx.jit
def _losses(model: LlamaModel, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    def losses(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return token_losses(model.logits(hidden), targets)[0]

    return map_query_chunks(losses, hidden[None], targets[None], chunk=_CHUNK)[0]
