"""One optimizer step as a pure function, compiled ahead of time for each phase."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key, UInt8

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.attend import CausalBackend
from dhisparse_jax.models.glm.dense import Attend, Causal, Features, run_layers
from dhisparse_jax.models.params import Nested, build_model
from dhisparse_jax.models.train.config import Phase, Rates, TrainConfig
from dhisparse_jax.models.train.losses import (
    CausalWithIndexLoss,
    ResidualDropout,
    SparseWithIndexLoss,
    language_loss,
)


class Metrics(NamedTuple):
    """Scalars of one step.

    Attributes:
        bits_per_byte: Training cross-entropy.
        index_divergence: Mean over the layers of the indexer's divergence, in nats.
        gradient_norm: Over all weights, before clipping.
        load_imbalance: Load of the busiest expert over the mean, worst layer.
    """

    bits_per_byte: Float[Array, ""]
    index_divergence: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    load_imbalance: Float[Array, ""]


class TrainState(NamedTuple):
    """Float32 weights and the optimizer's moments."""

    params: Nested
    moments: optax.OptState


class StepRates(NamedTuple):
    """Learning rates of one step, float32 scalars."""

    model: ArrayLike | jax.ShapeDtypeStruct
    index: ArrayLike | jax.ShapeDtypeStruct


Step = Callable[
    [TrainState, UInt8[Array, " stream"], Key[Array, ""], StepRates], tuple[TrainState, Metrics]
]


def rates_at(phase: Phase, fraction: float) -> StepRates:
    """Learning rates when `fraction` of a phase is done."""
    warm = min(1.0, fraction / phase.warmup) if phase.warmup else 1.0

    def at(rates: Rates) -> np.float32:
        falling = (1 + math.cos(math.pi * min(fraction, 1.0))) / 2
        return np.float32(warm * (rates.end + (rates.start - rates.end) * falling))

    return StepRates(at(phase.model_rates), at(phase.index_rates))


def label_params(params: Nested) -> Nested:
    """Which optimizer a weight has: "model", "index", or "fixed" (the router's balancing bias)."""

    def label(path: tuple[Any, ...], _: object) -> str:
        keys = [entry.key for entry in path]
        if "indexer" in keys:
            return "index"
        return "fixed" if keys[-2:] == ["router", "bias"] else "model"

    return jax.tree_util.tree_map_with_path(label, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW without the learning rate, clipped separately for the model and for the indexers."""

    def moved() -> optax.GradientTransformation:
        return adamw(config.adam_decays, config.max_gradient_norm, config.weight_decay)

    return optax.partition(
        {"model": moved(), "index": moved(), "fixed": optax.set_to_zero()}, label_params
    )


def adamw(
    decays: tuple[float, float], max_gradient_norm: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW without the learning rate, for clipped gradients; only matrices decay."""
    b1, b2 = decays
    return optax.chain(
        optax.clip_by_global_norm(max_gradient_norm),
        optax.scale_by_adam(b1=b1, b2=b2),
        optax.add_decayed_weights(
            weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
    )


def attend_in(phase: Phase, model: GlmConfig, backend: CausalBackend) -> Attend:
    """The attention, and with it the indexer's loss, of a phase."""
    match phase.kind:
        case "dense":
            return Causal(phase.chunk, backend)
        case "index":
            return CausalWithIndexLoss(phase.chunk, backend)
        case "sparse":
            return SparseWithIndexLoss(model.index_top_k, phase.chunk)


def make_step(config: TrainConfig, phase: Phase, backend: CausalBackend) -> Step:
    """The step of one phase: draws a batch from the stream, and moves the weights."""
    optimizer = make_optimizer(config)
    attend = attend_in(phase, config.model, backend)

    def loss_fn(
        params: Nested, tokens: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[Features, jax.Array]]:
        model = build_model(config.model, params, jnp.dtype(config.compute_dtype))
        dropout = ResidualDropout(key, 0.0 if phase.kind == "index" else config.dropout)
        features = run_layers(model, tokens[:, :-1], attend, dropout)
        language = language_loss(model, features, tokens[:, 1:])
        index = features.index_loss / config.model.num_layers
        loss = (
            index
            if phase.kind == "index"
            else (language.cross_entropy + config.z_loss * language.squared_log_z + index)
        )
        return loss, (features._replace(index_loss=index), language.cross_entropy)

    def step(
        state: TrainState, stream: jax.Array, key: jax.Array, rates: StepRates
    ) -> tuple[TrainState, Metrics]:
        batch_key, dropout_key = jax.random.split(key)
        tokens = draw_batch(stream, batch_key, phase.batch, phase.context + 1)
        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, (features, nats)), gradient = gradient_fn(state.params, tokens, dropout_key)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, moments = optimizer.update(gradient, state.moments, state.params)
        params = _apply(state.params, updates, rates)
        if phase.kind != "index":
            params = balance_experts(params, features.expert_load, config.balance_rate)
        load = features.expert_load.astype(jnp.float32)
        imbalance = jnp.max(load, initial=0.0) / jnp.maximum(jnp.mean(load), 1.0)
        metrics = Metrics(
            nats / math.log(2), features.index_loss, optax.tree.norm(gradient), imbalance
        )
        return TrainState(params, moments), metrics

    return step


def draw_batch(
    stream: UInt8[Array, " stream"], key: Key[Array, ""], batch: int, length: int
) -> Int[Array, "batch length"]:
    """Random pieces of the stream; they may cross documents."""
    starts = jax.random.randint(key, (batch,), 0, stream.shape[0] - length + 1)
    pieces = jax.vmap(lambda start: jax.lax.dynamic_slice(stream, (start,), (length,)))(starts)
    return pieces.astype(jnp.int32)


def balance_experts(params: Nested, loads: Int[Array, "moe_layers experts"], rate: float) -> Nested:
    """Raises the router bias of experts with less than the mean load, and lowers the others.

    The bias moves the choice of experts only, so it needs no gradient (the "noaux_tc" router).
    """
    layers = dict(params["layers"])
    moe_layers = [layer for layer in sorted(layers) if "router" in layers[layer]["mlp"]]
    for layer, load in zip(moe_layers, loads.astype(jnp.float32), strict=True):
        mlp = layers[layer]["mlp"]
        bias = mlp["router"]["bias"] + rate * jnp.sign(jnp.mean(load) - load)
        router = mlp["router"] | {"bias": bias}
        layers[layer] = layers[layer] | {"mlp": mlp | {"router": router}}
    return params | {"layers": layers}


def _apply(params: Nested, updates: optax.Updates, rates: StepRates) -> Nested:
    """Moves each weight against its update, by the rate of its label."""
    by_label = {"model": rates.model, "index": rates.index, "fixed": jnp.float32(0)}
    return jax.tree.map(
        lambda label, p, u: p - by_label[label] * u, label_params(params), params, updates
    )
