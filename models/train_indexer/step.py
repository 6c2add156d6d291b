"""One update of one indexer, and how well it selects, as pure functions.

The loss is that of DeepSeek-V3.2's dense warm-up (arXiv 2512.02556, section 2.1): the divergence of
the softmax of the index scores from the attention of the frozen model, averaged over heads, over
every position that a query sees. Here it is averaged over the layers of a group as well.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Float16, Int

from dhisparse_jax.configs.llama import FittedConfig
from dhisparse_jax.models.glm.attend import causal_mask
from dhisparse_jax.models.glm.indexer import Indexer, index_scores
from dhisparse_jax.models.params import Nested, fill, params_of
from dhisparse_jax.models.train.losses import kl_divergence
from dhisparse_jax.models.train.step import adamw
from dhisparse_jax.models.train_indexer.config import FitConfig


class FitState(NamedTuple):
    """Float32 weights of one indexer, and the optimizer's moments."""

    params: Nested
    moments: optax.OptState


class Batch(NamedTuple):
    """Some queries of a text, for one group."""

    inputs: Float16[Array, "s width"]
    positions: Int[Array, " queries"]
    targets: Float16[Array, "queries s"]


class Quality(NamedTuple):
    """How one indexer does on some queries, means over them.

    Attributes:
        divergence: What was minimised, in nats.
        chosen: Share of the attention that falls on what it selects, for each count.
        best: The same for the best selection of as many positions.
        window: The same for the first positions and the newest others.
    """

    divergence: Float[Array, ""]
    chosen: Float[Array, " counts"]
    best: Float[Array, " counts"]
    window: Float[Array, " counts"]


def fresh_state(config: FitConfig, seed: int) -> FitState:
    """An indexer with random weights."""
    made = params_of(Indexer(config.fitted, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(seed)))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), made)
    return FitState(params, _optimizer(config).init(params))


def rate_at(config: FitConfig, step: int) -> float:
    """Learning rate of a step."""
    fraction = step / config.steps
    warm = min(1.0, (step + 1) / max(1.0, config.warmup * config.steps))
    return warm * config.rate * (0.01 + 0.99 * (1 + math.cos(math.pi * fraction)) / 2)


def update(
    config: FitConfig, state: FitState, batch: Batch, rate: Float[Array, ""]
) -> tuple[FitState, Float[Array, ""]]:
    """One update; the divergence is that before it."""

    def loss(params: Nested) -> jax.Array:
        log_index, target, visible = _distributions(config.fitted, params, batch)
        return jnp.mean(kl_divergence(target, log_index, visible))

    value, gradient = jax.value_and_grad(loss)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, moments = _optimizer(config).update(gradient, state.moments, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    return FitState(params, moments), value


def judge(config: FitConfig, params: Nested, batch: Batch, sinks: int) -> Quality:
    """How well an indexer selects."""
    log_index, target, visible = _distributions(config.fitted, params, batch)
    back = batch.positions[:, None] - jnp.arange(target.shape[1])[None]
    near = jnp.where((jnp.arange(target.shape[1]) < sinks)[None], 0, back)
    recency = jnp.where(visible, -near.astype(jnp.float32), -jnp.inf)

    def share(order: jax.Array) -> jax.Array:
        return jnp.stack([_share(target, order, count) for count in config.counts])

    found = jnp.mean(kl_divergence(target, log_index, visible))
    return Quality(found, share(log_index), share(target), share(recency))


def _share(
    target: Float[Array, "queries s"], order: Float[Array, "queries s"], count: int
) -> Float[Array, ""]:
    """Mean attention on the `count` positions that come first in an order."""
    _, best = jax.lax.top_k(order, min(count, order.shape[1]))
    return jnp.mean(jnp.sum(jnp.take_along_axis(target, best, axis=-1), axis=-1))


def _distributions(
    config: FittedConfig, params: Nested, batch: Batch
) -> tuple[Float[Array, "queries s"], Float[Array, "queries s"], Bool[Array, "queries s"]]:
    """Log of the softmax of the index scores, the attention, and what is visible."""
    dtype = jnp.dtype(jnp.float32)
    indexer = fill(lambda: Indexer(config, dtype=dtype, rngs=nnx.Rngs(0)), params)
    inputs = batch.inputs.astype(dtype)
    asked = inputs[batch.positions]
    keys = indexer.keys(inputs, jnp.arange(inputs.shape[0]))
    queries = indexer.queries(asked, batch.positions)
    scores = index_scores(queries, keys, indexer.weights(asked))
    visible = causal_mask(batch.positions[None], inputs.shape[0])[0]
    log_index = jax.nn.log_softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    target = batch.targets.astype(dtype)
    target = target / jnp.sum(target, axis=-1, keepdims=True)  # half precision summed to about 1
    return log_index, target, visible


def _optimizer(config: FitConfig) -> optax.GradientTransformation:
    return adamw(config.adam_decays, config.max_gradient_norm, config.weight_decay)
