"""Forward pass over whole sequences, without a cache: for training, and as the oracle.

The layer loop is here once. How a layer attends is an `Attend` object, so that training can add its
losses (`models.train.losses`) without repeating the loop.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.model import Params
from dhisparse_jax.models.glm.attend import (
    CausalBackend,
    causal_attention,
    select_top_k,
    sparse_attention,
    window_positions,
)
from dhisparse_jax.models.glm.model import GlmBlock, GlmModel
from dhisparse_jax.models.glm.moe import MoeMlp
from dhisparse_jax.precision import full_precision

Mode = Literal["dense", "sparse", "window"]

# Queries per chunk: a chunk of float32 scores over 8,192 keys is 16 MiB per head and sequence.
DEFAULT_CHUNK = 512


class Attended(NamedTuple):
    """What attention in one layer gives.

    Attributes:
        update: Residual update.
        shared: What the first layer of a selection group hands to the others of the group.
        loss: Scalar training loss of the indexer in this layer; zero where there is none.
    """

    update: Float[Array, "batch s width"]
    shared: object = None
    loss: Float[Array, ""] | float = 0.0


@runtime_checkable
class Attend(Protocol):
    """How the layers of a model attend. `shared` is None before the first layer of a group."""

    def __call__(
        self,
        block: GlmBlock,
        x: Float[Array, "batch s width"],
        positions: Int[Array, "batch s"],
        shared: object,
    ) -> Attended:
        """Attention of one layer over normalised inputs `x`."""
        ...


@dataclass(frozen=True)
class Causal:
    """Every position up to the query's own."""

    chunk: int = DEFAULT_CHUNK
    backend: CausalBackend = "xla"

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> Attended:
        """See `Attend`."""
        attention = block.attention
        heads = causal_attention(
            attention.expand(x, positions),
            positions,
            attention.scale,
            chunk=self.chunk,
            backend=self.backend,
        )
        return Attended(attention.output(heads))


@dataclass(frozen=True)
class Sparse:
    """The exact top-K of the group's indexer."""

    count: int
    chunk: int = DEFAULT_CHUNK

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> Attended:
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
        return Attended(block.attention.combine(context), shared)


@dataclass(frozen=True)
class Window:
    """The newest `count` positions: what is left of a sparse model without its indexer."""

    count: int
    chunk: int = DEFAULT_CHUNK

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> Attended:
        """See `Attend`."""
        projected = block.attention.project(x, positions)
        selected = window_positions(positions, self.count)
        scale = block.attention.scale
        context, _ = sparse_attention(projected, selected, scale, chunk=self.chunk)
        return Attended(block.attention.combine(context))


def attend_for(model: GlmModel, mode: Mode, chunk: int = DEFAULT_CHUNK) -> Attend:
    """The attention of `mode`: "sparse" is what the model is made for."""
    match mode:
        case "dense":
            return Causal(chunk)
        case "sparse":
            return Sparse(model.config.index_top_k, chunk)
        case "window":
            return Window(model.config.index_top_k, chunk)


class Features(NamedTuple):
    """Result of the layers.

    Attributes:
        h: Residual stream after the last layer.
        index_loss: Sum of the layers' indexer losses.
        expert_load: Tokens that chose each expert, per expert layer.
        taps: Residual stream after the tapped layers, concatenated; what a draft reads.
    """

    h: Float[Array, "batch s width"]
    index_loss: Float[Array, ""]
    expert_load: Int[Array, "moe_layers experts"]
    taps: Float[Array, "batch s tapped"]


@runtime_checkable
class Dropout(Protocol):
    """Drops parts of a residual update; `site` numbers the places where that happens."""

    def __call__(
        self, update: Float[Array, "batch s width"], site: int
    ) -> Float[Array, "batch s width"]:
        """The update with a part of its values zeroed and the others scaled up."""
        ...


def run_layers(
    model: GlmModel,
    tokens: Int[Array, "batch s"],
    attend: Attend,
    dropout: Dropout = lambda update, site: update,
    taps: tuple[int, ...] = (),
) -> Features:
    """Embeds sequences that start at position 0 and runs every layer."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h = model.embed(tokens)
    shared: object = None
    index_loss = jnp.float32(0.0)
    loads: list[jax.Array] = []
    after: dict[int, jax.Array] = {}
    for layer, block in enumerate(model.layers):
        attended = attend(block, block.input_norm(h), positions, shared)
        shared = attended.shared
        index_loss = index_loss + attended.loss
        h = h + dropout(attended.update, 2 * layer)
        update, load = _feed_forward(block, block.post_norm(h))
        loads.extend(load)
        h = h + dropout(update, 2 * layer + 1)
        after[layer] = h
    experts = model.config.num_experts
    stacked = jnp.stack(loads) if loads else jnp.zeros((0, experts), jnp.int32)
    tapped = jnp.concatenate([h[..., :0], *(after[layer] for layer in taps)], axis=-1)
    return Features(h, index_loss, stacked, tapped)


def _feed_forward(block: GlmBlock, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Residual update of the MLP, and how many tokens chose each expert if it has experts."""
    if not isinstance(block.mlp, MoeMlp):
        return block.mlp(x), []
    routing = block.mlp.router(x)
    picks = jax.nn.one_hot(routing.experts, block.mlp.num_experts, dtype=jnp.int32)
    load = jnp.sum(picks.reshape(-1, picks.shape[-1]), axis=0)
    return block.mlp(x, routing), [load]


def forward(
    model: GlmModel,
    tokens: Int[Array, "batch s"],
    *,
    mode: Mode,
    chunk: int = DEFAULT_CHUNK,
) -> Float[Array, "batch s vocab"]:
    """Float32 next-token logits at every position of sequences that start at position 0.

    Args:
        model: The model; computes in its `dtype`.
        tokens: Token ids.
        mode: Which positions a query attends to.
        chunk: Queries per attention step; bounds memory, does not change the result.
    """
    return model.logits(run_layers(model, tokens, attend_for(model, mode, chunk)).h)


@partial(jax.jit, static_argnums=(0, 3))
@full_precision
def served_logits(
    graph: nnx.GraphDef[GlmModel],
    params: Params,
    tokens: Int[Array, "batch s"],
    chunk: int = DEFAULT_CHUNK,
) -> Float[Array, "batch s vocab"]:
    """`forward` of a model as it is served: graph and weights apart."""
    return forward(nnx.merge(graph, params), tokens, mode="sparse", chunk=chunk)
