"""A whole text through a model, layer by layer: what calibration, evaluation and prompts need.

Every layer runs the same compiled programs, so a model of any depth compiles in seconds, and a text
of thousands of tokens fits into a small memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.llama.attend import Seen, masked_attention
from dhisparse_jax.models.llama.model import Heads, LlamaLayer, LlamaModel


class LayerView(NamedTuple):
    """What a layer attends with.

    Attributes:
        number: Of the layer.
        normed: Its normalised input, which an indexer reads.
        heads: Queries, keys and values of every position.
    """

    number: int
    normed: Float[Array, "s width"]
    heads: Heads


Look = Callable[[LayerView], Seen]
"""What a layer attends to; called for every layer in order, and free to keep what it sees."""


def run_layers(model: LlamaModel, tokens: Int[Array, " s"], look: Look) -> Float[Array, "s width"]:
    """The residual stream of a text after the last layer."""
    x = _embed(model.embedding[...], tokens).astype(model.dtype)
    for number, layer in enumerate(model.layers):
        normed, heads = _project(layer, x)
        seen = look(LayerView(number, normed, heads))
        x = _finish(layer, x, heads, seen, model.config.scale)
    return x


@jax.jit
def _embed(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    return embedding[tokens]


@nnx.jit
def _project(layer: LlamaLayer, x: jax.Array) -> tuple[jax.Array, Heads]:
    normed = layer.input_norm(x)
    return normed, layer.project(normed, jnp.arange(x.shape[0]))


@nnx.jit(static_argnums=4)
def _finish(
    layer: LlamaLayer, x: jax.Array, heads: Heads, seen: jax.Array, scale: float
) -> jax.Array:
    return layer.finish(x, masked_attention(heads, seen, scale))
