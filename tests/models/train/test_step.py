import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.params import flatten
from dhisparse_jax.models.train.config import Phase, Rates, TrainConfig, smoke_config
from dhisparse_jax.models.train.loop import initial_params, run_key
from dhisparse_jax.models.train.step import (
    StepRates,
    TrainState,
    balance_experts,
    draw_batch,
    make_optimizer,
    make_step,
    rates_at,
)
from tests.support.small_glm import SMALL

pytestmark = pytest.mark.slow


CONFIG = smoke_config(SMALL, seed=0, context=16)
STREAM = jnp.asarray(np.random.default_rng(0).integers(1, 99, 4000), jnp.uint8)


@functools.cache
def start():
    return initial_params(SMALL, 0)


@functools.cache
def train(kind, steps):
    """Weights before and after, and the metrics of each step."""
    phase = next(p for p in CONFIG.phases if p.kind == kind and p.context == 16)
    step = jax.jit(make_step(CONFIG, phase, "xla"))
    rate, zero = jnp.float32(3e-3), jnp.float32(0)
    rates = StepRates(zero if kind == "index" else rate, zero if kind == "dense" else rate)
    state, seen = TrainState(start(), make_optimizer(CONFIG).init(start())), []
    for number in range(steps):
        key = jax.random.fold_in(run_key(0), number)
        state, metrics = step(state, STREAM, key, rates)
        seen.append(metrics)
    return flatten(start()), flatten(state.params), seen


STEPS = {"dense": 40, "index": 120, "sparse": 1}


@pytest.mark.parametrize("kind", STEPS)
def test_each_phase_moves_its_weights_and_no_others(kind):
    before, after, _ = train(kind, STEPS[kind])
    for name, array in before.items():
        is_index, is_bias = "indexer" in name, name.endswith("router.bias")
        moves = {"dense": not is_index, "index": is_index, "sparse": True}[kind]
        if is_bias:
            moves = kind != "index"
        assert np.isfinite(after[name]).all(), name
        assert bool((np.asarray(array) != np.asarray(after[name])).any()) == moves, name


def test_index_phase_learns_the_attention():
    _, _, seen = train("index", STEPS["index"])
    first = np.mean([m.index_divergence for m in seen[:5]])
    last = np.mean([m.index_divergence for m in seen[-5:]])
    assert 0 < last < 0.7 * first


def test_dense_phase_learns_the_text():
    _, _, seen = train("dense", STEPS["dense"])
    assert seen[-1].bits_per_byte < seen[0].bits_per_byte - 1


def test_batches_are_pieces_of_the_stream():
    batch = np.asarray(draw_batch(STREAM, run_key(1), 8, 20))
    text = np.asarray(STREAM).tobytes()
    assert batch.shape == (8, 20)
    assert all(row.astype(np.uint8).tobytes() in text for row in batch)
    assert len({tuple(row) for row in batch.tolist()}) == 8


def test_balancing_favours_idle_experts():
    params = start()
    loads = jnp.asarray([[10, 10, 10, 10], [30, 8, 2, 0]])
    layers = balance_experts(params, loads, 0.1)["layers"]
    np.testing.assert_allclose(layers[1]["mlp"]["router"]["bias"], 0, atol=1e-7)
    moved = layers[2]["mlp"]["router"]["bias"]
    np.testing.assert_allclose(moved, [-0.1, 0.1, 0.1, 0.1], rtol=1e-5)


def test_rates_rise_then_fall_by_a_cosine():
    phase = Phase(
        name="p",
        kind="dense",
        context=8,
        batch=1,
        share=1.0,
        warmup=0.1,
        model_rates=Rates(1.0, 0.2),
    )
    assert rates_at(phase, 0.0).model == 0
    assert rates_at(phase, 0.05).model == pytest.approx(0.5, abs=0.01)
    assert rates_at(phase, 0.5).model == pytest.approx(0.6)
    assert rates_at(phase, 1.0).model == pytest.approx(0.2)
    assert rates_at(phase, 0.5).index == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_seconds": 20.0}, "leaves no time"),
        ({"phases": CONFIG.phases[:1]}, "sum to"),
        ({"eval_context": 10_000}, "exceeds the model's 128"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_published_settings_are_valid():
    from dhisparse_jax.configs import TINY

    assert len(TrainConfig(model=TINY).phases) == 4
