"""Forward pass over whole sequences, without a cache: for training, and as the oracle.

The layer loop is here once. How a layer attends is an `Attend` object, so that training can add its
losses (`models.train.losses`) without repeating the loop.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.models.glm.attend import (
    CausalBackend,
    causal_attention,
    select_top_k,
    sparse_attention,
    window_positions,
)
from dhisparse_jax.models.glm.model import GlmBlock, GlmModel

Mode = Literal["dense", "sparse", "window"]

# Queries per chunk: a chunk of scores over 8,192 keys is 16 MB per head and sequence.
DEFAULT_CHUNK = 512


class Attend(Protocol):
    """How the layers of a model attend.

    `shared` is what the first layer of a selection group hands to the others of the group; it is
    None before that layer.
    """

    def __call__(
        self,
        block: GlmBlock,
        x: Float[Array, "batch s width"],
        positions: Int[Array, "batch s"],
        shared: object,
    ) -> tuple[Float[Array, "batch s width"], object]:
        """Residual update of one layer, and what to share with the next one."""
        ...


@dataclass(frozen=True)
class Causal:
    """Every position up to the query's own."""

    chunk: int = DEFAULT_CHUNK
    backend: CausalBackend = "xla"

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> tuple[jax.Array, object]:
        """See `Attend`."""
        attention = block.attention
        heads = causal_attention(
            attention.expand(x, positions),
            positions,
            attention.scale,
            chunk=self.chunk,
            backend=self.backend,
        )
        return attention.output(heads), None


@dataclass(frozen=True)
class Sparse:
    """The exact top-K of the group's indexer."""

    count: int
    chunk: int = DEFAULT_CHUNK

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> tuple[jax.Array, object]:
        """See `Attend`."""
        projected = block.attention.project(x, positions)
        if block.indexer is not None:
            indexer = block.indexer
            shared = select_top_k(
                indexer.queries(projected.q_lora, positions),
                indexer.keys(x, positions),
                indexer.weights(x),
                positions,
                count=self.count,
                chunk=self.chunk,
            )
        assert isinstance(shared, jax.Array)
        scale = block.attention.scale
        context, _ = sparse_attention(projected, shared, scale, chunk=self.chunk)
        return block.attention.combine(context), shared


@dataclass(frozen=True)
class Window:
    """The newest `count` positions: what is left of a sparse model without its indexer."""

    count: int
    chunk: int = DEFAULT_CHUNK

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> tuple[jax.Array, object]:
        """See `Attend`."""
        projected = block.attention.project(x, positions)
        selected = window_positions(positions, self.count)
        scale = block.attention.scale
        context, _ = sparse_attention(projected, selected, scale, chunk=self.chunk)
        return block.attention.combine(context), None


def attend_for(model: GlmModel, mode: Mode, chunk: int = DEFAULT_CHUNK) -> Attend:
    """The attention of `mode`: "sparse" is what the model is made for."""
    match mode:
        case "dense":
            return Causal(chunk)
        case "sparse":
            return Sparse(model.config.index_top_k, chunk)
        case "window":
            return Window(model.config.index_top_k, chunk)


def forward(
    model: GlmModel,
    tokens: Int[Array, "batch s"],
    *,
    mode: Mode,
    chunk: int = DEFAULT_CHUNK,
) -> Float[Array, "batch s vocab"]:
    """Next-token logits at every position of sequences that start at position 0.

    Args:
        model: The model; computes in its `dtype`.
        tokens: Token ids.
        mode: Which positions a query attends to.
        chunk: Queries per attention step; bounds memory, does not change the result.
    """
    attend = attend_for(model, mode, chunk)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h = model.embed(tokens)
    shared: object = None
    for block in model.layers:
        update, shared = attend(block, block.input_norm(h), positions, shared)
        h = h + update
        h = h + block.mlp(block.post_norm(h))
    return model.logits(h)
