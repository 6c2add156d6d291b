"""The model's parts against transformers' outputs, without a hierarchy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.deepseek_v4.hyper import HyperConnection
from dhisparse_jax.models.deepseek_v4.moe import bounded_swiglu
from dhisparse_jax.models.hf import load_hf
from tests.support.small_v4 import FIXTURE, LOGITS, TOKENS, dense, model

SELECTED = np.load(FIXTURE / "selected.npz")
ROUTED = np.load(FIXTURE / "routed.npz")


@pytest.fixture(scope="module")
def run():
    """Logits, selections and routings of the whole text."""
    return dense(TOKENS)


def test_logits_are_those_of_transformers(run):
    assert np.abs(run[0] - LOGITS).max() < 4e-5


def test_selections_are_those_of_transformers(run):
    layers = [i for i, kind in enumerate(model()[0].config.layer_kinds) if kind == "selected"]
    assert len(run[1]) == len(layers) == 2
    for layer, found in zip(layers, run[1], strict=True):
        expected = np.sort(np.where(SELECTED[f"layer_{layer}"] < 0, 99, SELECTED[f"layer_{layer}"]))
        assert np.array_equal(np.where(found < 0, 99, found), expected)


def test_routing_is_that_of_transformers(run):
    assert len(run[2]) == model()[0].config.num_layers
    for layer, routing in enumerate(run[2]):
        order = np.argsort(routing.experts[0], axis=-1)
        experts, weights = (np.take_along_axis(np.asarray(p[0]), order, axis=-1) for p in routing)
        assert np.array_equal(experts, ROUTED[f"experts_{layer}"])
        assert np.abs(weights - ROUTED[f"weights_{layer}"]).max() < 1e-5


def test_a_draft_reads_the_mean_of_the_streams_after_a_layer(run):
    assert len(run[3]) == model()[0].config.num_layers
    for read, streams in run[3]:
        assert np.abs(read - np.asarray(streams).mean(axis=-2)).max() < 1e-6
    last = run[3][-1][1].reshape(1, len(TOKENS), -1)
    assert np.abs(model()[0].logits(model()[1], last)[0] - LOGITS).max() < 4e-5


def test_leading_layers_route_by_token_alone():
    router = load_hf(FIXTURE).model.layers[0].mlp.router
    x = jax.random.normal(jax.random.key(0), (2, 4, 32))
    tokens = jnp.asarray([[3, 5, 3, 90], [5, 5, 3, 0]], jnp.int32)
    experts = np.asarray(router(x, tokens).experts)
    assert np.array_equal(experts, np.asarray(router.by_token[...])[np.asarray(tokens)])


def test_streams_are_carried_nearly_doubly_stochastically():
    hyper = load_hf(FIXTURE).model.layers[1].attention_hyper
    assert isinstance(hyper, HyperConnection)
    mixing = hyper.mixing(jax.random.normal(jax.random.key(1), (5, 3, 32)))
    assert mixing.carry.shape == (5, 3, 3)
    assert np.abs(mixing.carry.sum(axis=-2) - 1).max() < 1e-4
    assert np.abs(mixing.carry.sum(axis=-1) - 1).max() < 0.05
    assert float(mixing.pre.min()) > 0


def test_the_gate_is_bounded_above_and_the_other_factor_on_both_sides():
    gate, up = jnp.asarray([-9.0, 9.0, 9.0]), jnp.asarray([0.5, 9.0, -9.0])
    high = float(jax.nn.silu(2.0))
    found = bounded_swiglu(gate, up, 2.0)
    assert np.allclose(found, [float(jax.nn.silu(-9.0)) * 0.5, 2 * high, -2 * high])
