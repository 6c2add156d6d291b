"""What is minimised: next-byte cross-entropy, and the indexer's distance from the attention.

An indexer is trained to give the distribution that attention has, averaged over the heads and over
the layers of its selection group. Its inputs and its targets carry no gradient, so it learns from
that distance alone, and the model from the cross-entropy alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dhisparse_jax.models.glm.attend import (
    CausalBackend,
    causal_attention,
    causal_mask,
    causal_weights,
    gather_rows,
    map_query_chunks,
    select_top_k,
    sparse_attention,
)
from dhisparse_jax.models.glm.dense import Attended, Features
from dhisparse_jax.models.glm.indexer import Indexer, index_scores
from dhisparse_jax.models.glm.model import GlmBlock, GlmModel


class IndexInputs(NamedTuple):
    """Queries, keys and head weights of one selection group's indexer."""

    queries: Float[Array, "batch s index_heads index_dim"]
    keys: Float[Array, "batch s index_dim"]
    weights: Float[Array, "batch s index_heads"]


class Chosen(NamedTuple):
    """A group's selection, and the indexer's log-distribution over it."""

    selected: Int[Array, "batch s chosen"]
    log_index: Float[Array, "batch s chosen"]


@dataclass(frozen=True)
class CausalWithIndexLoss:
    """Causal attention; the indexer's loss is over every visible position."""

    chunk: int
    backend: CausalBackend

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> Attended:
        """See `models.glm.dense.Attend`."""
        attention = block.attention
        inputs = attention.expand(x, positions)
        if block.indexer is not None:
            shared = _index_inputs(block.indexer, x, inputs.q_lora, positions)
        assert isinstance(shared, IndexInputs)
        heads = causal_attention(
            inputs, positions, attention.scale, chunk=self.chunk, backend=self.backend
        )
        loss = _causal_index_loss(
            shared, inputs.q, inputs.k, positions, scale=attention.scale, chunk=self.chunk
        )
        return Attended(attention.output(heads), shared, loss)


@dataclass(frozen=True)
class SparseWithIndexLoss:
    """Exact top-K attention; the indexer's loss is over the selected positions."""

    count: int
    chunk: int

    def __call__(
        self, block: GlmBlock, x: jax.Array, positions: jax.Array, shared: object
    ) -> Attended:
        """See `models.glm.dense.Attend`."""
        projected = block.attention.project(x, positions)
        if block.indexer is not None:
            index = _index_inputs(block.indexer, x, projected.q_lora, positions)
            shared = _choose(index, positions, count=self.count, chunk=self.chunk)
        assert isinstance(shared, Chosen)
        context, weights = sparse_attention(
            projected, shared.selected, block.attention.scale, chunk=self.chunk
        )
        divergence = kl_divergence(weights, shared.log_index, shared.selected >= 0)
        return Attended(block.attention.combine(context), shared, jnp.mean(divergence))


def _index_inputs(
    indexer: Indexer, x: jax.Array, q_lora: jax.Array, positions: jax.Array
) -> IndexInputs:
    """The indexer's view of a layer, cut off from the model's gradient."""
    x, q_lora = jax.lax.stop_gradient((x, q_lora))
    return IndexInputs(
        indexer.queries(q_lora, positions), indexer.keys(x, positions), indexer.weights(x)
    )


def kl_divergence(
    target: Float[Array, "*batch rows"],
    log_index: Float[Array, "*batch rows"],
    visible: Bool[Array, "*batch rows"],
) -> Float[Array, "*batch"]:
    """Kullback-Leibler divergence, in nats, of the index distribution from a fixed target."""
    target = jax.lax.stop_gradient(target)
    log_target = jnp.log(jnp.maximum(target, 1e-30))
    return jnp.sum(jnp.where(visible, target * (log_target - log_index), 0.0), axis=-1)


def _causal_index_loss(
    index: IndexInputs,
    q: Float[Array, "batch s heads qk"],
    k: Float[Array, "batch s heads qk"],
    positions: Int[Array, "batch s"],
    *,
    scale: float,
    chunk: int,
) -> Float[Array, ""]:
    """Mean divergence over the queries, from the head-averaged causal attention."""
    q, k = jax.lax.stop_gradient((q, k))

    def divergence(
        q: jax.Array, queries: jax.Array, weights: jax.Array, positions: jax.Array
    ) -> jax.Array:
        target = jnp.mean(causal_weights(q, k, positions, scale), axis=1)
        visible = causal_mask(positions, k.shape[1])
        scores = index_scores(queries, index.keys, weights)
        log_index = jax.nn.log_softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return kl_divergence(target, log_index, visible)

    return jnp.mean(
        map_query_chunks(divergence, q, index.queries, index.weights, positions, chunk=chunk)
    )


def _choose(index: IndexInputs, positions: jax.Array, *, count: int, chunk: int) -> Chosen:
    """The exact selection, and the distribution over it that the indexer is trained by."""
    selected = select_top_k(*index, positions, count=count, chunk=chunk)

    def log_distribution(queries: jax.Array, weights: jax.Array, selected: jax.Array) -> jax.Array:
        keys = gather_rows(index.keys, selected)
        dots = jnp.einsum("bthd,btkd->bthk", queries, keys, preferred_element_type=jnp.float32)
        scores = jnp.sum(jax.nn.relu(dots) * weights[..., None], axis=-2)
        return jax.nn.log_softmax(jnp.where(selected >= 0, scores, -jnp.inf), axis=-1)

    log_index = map_query_chunks(
        log_distribution, index.queries, index.weights, selected, chunk=chunk
    )
    return Chosen(selected, log_index)


@dataclass(frozen=True)
class ResidualDropout:
    """Zeroes a part of every residual update, differently at each site."""

    key: Key[Array, ""]
    rate: float

    def __call__(self, update: jax.Array, site: int) -> jax.Array:
        """See `models.glm.dense.Dropout`."""
        if self.rate == 0:
            return update
        keep = jax.random.bernoulli(jax.random.fold_in(self.key, site), 1 - self.rate, update.shape)
        return jnp.where(keep, update / (1 - self.rate), jnp.zeros_like(update))


class LanguageLoss(NamedTuple):
    """Mean cross-entropy in nats, and the mean squared log-partition."""

    cross_entropy: Float[Array, ""]
    squared_log_z: Float[Array, ""]


def language_loss(
    model: GlmModel, features: Features, targets: Int[Array, "batch s"]
) -> LanguageLoss:
    """Loss of predicting `targets` at every position."""
    losses, log_z = token_losses(model.logits(features.h), targets)
    return LanguageLoss(jnp.mean(losses), jnp.mean(jnp.square(log_z)))


def token_losses(
    logits: Float[Array, "batch s vocab"], targets: Int[Array, "batch s"]
) -> tuple[Float[Array, "batch s"], Float[Array, "batch s"]]:
    """Cross-entropy of each target in nats, and the log-partition."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_z - picked, log_z
