import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhisparse_jax.models import experts as moe
from dhisparse_jax.models.glm.moe import MoeMlp, Router
from tests.support.small_glm import SMALL


def make(**changes):
    config = dataclasses.replace(SMALL, **changes)
    layer = MoeMlp(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, config.hidden_size)), jnp.float32)
    return config, layer, x


def by_hand(config, layer, x):
    """One token at a time, in float64."""
    f = lambda w: np.asarray(w[...], np.float64)
    swish = lambda v: v / (1 + np.exp(-v))
    tokens = np.asarray(x, np.float64).reshape(-1, config.hidden_size)
    out = np.zeros_like(tokens)
    for n, token in enumerate(tokens):
        scores = 1 / (1 + np.exp(-(token @ f(layer.router.kernel))))
        choice = scores + f(layer.router.bias)
        groups = choice.reshape(config.num_expert_groups, -1)
        best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-best, kind="stable")[: config.kept_expert_groups]
        masked = np.full_like(groups, -np.inf)
        masked[kept] = groups[kept]
        picks = np.argsort(-masked.reshape(-1), kind="stable")[: config.experts_per_token]
        weights = scores[picks] / scores[picks].sum() * config.routed_scale
        for pick, weight in zip(picks, weights, strict=True):
            gate, up = np.split(token @ f(layer.gate_up)[pick], 2)
            out[n] += weight * ((swish(gate) * up) @ f(layer.down)[pick])
        shared = layer.shared
        hidden = swish(token @ f(shared.gate.kernel)) * (token @ f(shared.up.kernel))
        out[n] += hidden @ f(shared.down.kernel)
    return out.reshape(x.shape)


@pytest.mark.parametrize("limit", [0, 16])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_experts_equal_a_loop_over_tokens(limit, groups, monkeypatch):
    monkeypatch.setattr(moe, "_MAX_EXPERTS_ALL_RUN", limit)  # 0: sorted, 16: all experts run
    config, layer, x = make(
        num_experts=8, num_expert_groups=groups[0], kept_expert_groups=groups[1]
    )
    layer.router.bias[...] = jnp.linspace(-0.4, 0.4, 8)
    np.testing.assert_allclose(jax.jit(layer)(x), by_hand(config, layer, x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_both_ways_have_the_same_gradient(monkeypatch):
    _, layer, x = make()
    graph, state = nnx.split(layer)

    def gradient(limit):
        monkeypatch.setattr(moe, "_MAX_EXPERTS_ALL_RUN", limit)
        return jax.grad(lambda s: jnp.sum(jnp.square(nnx.merge(graph, s)(x))))(state)

    for a, b in zip(jax.tree.leaves(gradient(0)), jax.tree.leaves(gradient(16)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_bias_moves_the_choice_but_not_the_weights():
    router = Router(SMALL, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, SMALL.hidden_size)), jnp.float32)
    router.bias[...] = jnp.asarray([5.0, 0.0, 0.0, 0.0])
    routing = router(x)
    assert (routing.experts == 0).any(axis=1).all()
    np.testing.assert_allclose(routing.weights.sum(axis=1), SMALL.routed_scale, rtol=1e-6)
    scores = jax.nn.sigmoid(x @ router.kernel[...])
    picked = jnp.take_along_axis(scores, routing.experts, axis=1)
    expected = picked / picked.sum(axis=1, keepdims=True) * SMALL.routed_scale
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)
