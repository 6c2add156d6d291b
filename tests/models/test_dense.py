import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhisparse_jax.models.glm import attend, dense
from dhisparse_jax.models.glm.attend import select_top_k, window_positions
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.glm.moe import Router
from dhisparse_jax.models.hf import load_hf
from tests.support.small_glm import FIXTURE, FIXTURES, PUBLISHED_MODELS, small_model


@pytest.fixture(scope="module")
def published():
    model = load_hf(FIXTURE).model
    return model, jnp.asarray(np.load(FIXTURE / "inputs.npy"), jnp.int32)


def run(model, tokens, **options):
    return jax.jit(lambda tokens: forward(model, tokens, **options))(tokens)


def tokens_of(length, batch=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (batch, length)), jnp.int32)


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_logits_selections_and_routing_equal_the_published_implementation(name, monkeypatch):
    folder = FIXTURES / name
    model = load_hf(folder).model
    tokens = jnp.asarray(np.load(folder / "inputs.npy"), jnp.int32)
    selections, routed = [], []

    def spy(*inputs, **options):
        selections.append(attend.select_top_k(*inputs, **options))
        return selections[-1]

    route = Router.__call__

    def spy_router(router, x):
        routed.append(route(router, x))
        return routed[-1]

    monkeypatch.setattr(dense, "select_top_k", spy)
    monkeypatch.setattr(Router, "__call__", spy_router)
    logits = forward(model, tokens, mode="sparse")
    np.testing.assert_allclose(logits[0], np.load(folder / "logits.npy"), atol=4e-5, rtol=0)
    expected = np.load(folder / "selected.npz")
    assert len(selections) == len(expected.files) == 3
    for chosen, layer in zip(selections, expected.files, strict=True):
        np.testing.assert_array_equal(np.sort(chosen[0], axis=-1), expected[layer])
    expected, first = np.load(folder / "routed.npz"), model.config.num_dense_layers
    assert 2 * len(routed) == len(expected.files) > 0
    for layer, found in enumerate(routed, start=first):
        order = np.argsort(found.experts[0], axis=-1)
        experts = np.take_along_axis(np.asarray(found.experts[0]), order, axis=-1)
        weights = np.take_along_axis(np.asarray(found.weights[0]), order, axis=-1)
        np.testing.assert_array_equal(experts, expected[f"experts_{layer}"])
        np.testing.assert_allclose(weights, expected[f"weights_{layer}"], atol=1e-5, rtol=0)


def test_all_modes_agree_while_everything_is_selected(published):
    model, tokens = published
    head = tokens[:, : model.config.index_top_k]
    expected = np.load(FIXTURE / "logits.npy")[: head.shape[1]]
    for mode in ("dense", "sparse", "window"):
        np.testing.assert_allclose(run(model, head, mode=mode)[0], expected, atol=4e-5, rtol=0)


@pytest.mark.parametrize("mode", ["dense", "sparse", "window"])
def test_chunks_do_not_change_the_result(mode):
    model, tokens = small_model(), tokens_of(21)
    whole = run(model, tokens, mode=mode, chunk=64)
    np.testing.assert_allclose(run(model, tokens, mode=mode, chunk=8), whole, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["dense", "sparse", "window"])
def test_later_tokens_do_not_change_earlier_logits(mode):
    model, tokens = small_model(), tokens_of(16)
    changed = tokens.at[:, 10:].set(7)
    before, after = run(model, tokens, mode=mode), run(model, changed, mode=mode)
    np.testing.assert_allclose(before[:, :10], after[:, :10], atol=1e-5, rtol=0)
    assert np.abs(before[:, 10:] - after[:, 10:]).max() > 1e-2


def test_window_sees_no_further_than_its_layers_reach():
    model, tokens = small_model(), tokens_of(32)
    reach = model.config.num_layers * (model.config.index_top_k - 1)
    changed = tokens.at[:, : 31 - reach].set(7)
    before = run(model, tokens, mode="window")
    after = run(model, changed, mode="window")
    np.testing.assert_allclose(before[:, -1], after[:, -1], atol=1e-5, rtol=0)
    assert (
        np.abs(
            run(model, tokens, mode="dense")[:, -1] - run(model, changed, mode="dense")[:, -1]
        ).max()
        > 1e-3
    )


def test_window_positions_are_the_newest():
    positions = window_positions(jnp.arange(5)[None], 3)
    assert positions[0].tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1], [4, 3, 2]]


def test_ties_go_to_the_lowest_position_and_minus_zero_ties_with_zero():
    # Key 0 is opposite to the query, the others orthogonal: every score is 0, that of key 0 too,
    # and a negative head weight makes some of them -0.0.
    queries = jnp.ones((1, 4, 1, 2))
    keys = jnp.asarray([[[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]])
    weights = jnp.asarray([[[-1.0], [1.0], [-1.0], [-1.0]]])
    chosen = select_top_k(queries, keys, weights, jnp.arange(4)[None], count=2, chunk=4)
    assert chosen[0].tolist() == [[0, -1], [0, 1], [0, 1], [0, 1]]


def test_selection_equals_a_sort():
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    queries, keys, weights = draw(1, 40, 3, 4), draw(1, 40, 4), draw(1, 40, 3)
    chosen = select_top_k(queries, keys, weights, jnp.arange(40)[None], count=5, chunk=16)
    dots = np.maximum(np.einsum("thd,sd->ths", queries[0], keys[0]), 0)
    scores = np.einsum("ths,th->ts", dots, weights[0])
    for t in range(40):
        order = sorted(range(t + 1), key=lambda s: (-scores[t, s], s))[:5]
        expected = order + [-1] * (5 - len(order))
        assert chosen[0, t].tolist() == expected


def test_gradients_are_finite_and_reach_every_weight_of_the_model():
    from dhisparse_jax.models.params import build_model, flatten, params_of

    model, tokens = small_model(), tokens_of(12)

    def loss(params):
        rebuilt = build_model(model.config, params, jnp.float32)
        return jnp.mean(jnp.square(forward(rebuilt, tokens, mode="sparse", chunk=8)))

    gradients = flatten(jax.jit(jax.grad(loss))(params_of(model)))
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        # The choice of rows and of experts is not differentiable.
        untouched = "indexer" in name or name.endswith("router.bias")
        assert bool(np.any(gradient)) != untouched, name


def test_taps_are_the_residual_stream_after_their_layers():
    """The last layer's is what the head reads; another one's is that of a model cut off there."""
    model, tokens = small_model(), tokens_of(12)
    attend_all = dense.Causal()
    features = dense.run_layers(model, tokens, attend_all, taps=(2, 0))
    width = model.config.hidden_size
    np.testing.assert_array_equal(features.taps[..., :width], features.h)
    shorter = small_model()
    shorter.layers = nnx.List(list(shorter.layers)[:1])
    cut = dense.run_layers(shorter, tokens, attend_all).h
    np.testing.assert_allclose(features.taps[..., width:], cut, atol=1e-6)
    assert dense.run_layers(model, tokens, attend_all).taps.shape[-1] == 0
