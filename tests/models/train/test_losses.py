import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.glm.dense import Causal, Sparse, run_layers
from dhisparse_jax.models.train.losses import (
    CausalWithIndexLoss,
    ResidualDropout,
    SparseWithIndexLoss,
    token_losses,
)
from tests.support.small_glm import SMALL, small_model

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 19)), jnp.int32)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def divergence_by_hand(model, top_k):
    """Sum over the layers of the mean divergence, one query at a time."""
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    attend = Causal(64) if top_k is None else Sparse(top_k, 64)
    h, total, shared = model.embed(TOKENS), 0.0, None
    for block in model.layers:
        x = block.input_norm(h)
        inputs = block.attention.expand(x, positions)
        q, k = np.asarray(inputs.q), np.asarray(inputs.k)
        if block.indexer is not None:
            iq = np.asarray(block.indexer.queries(inputs.q_lora, positions))
            ik = np.asarray(block.indexer.keys(x, positions))
            iw = np.asarray(block.indexer.weights(x))
        losses = []
        for b in range(q.shape[0]):
            for t in range(q.shape[1]):
                scores = iw[b, t] @ np.maximum(iq[b, t] @ ik[b, : t + 1].T, 0)
                count = t + 1 if top_k is None else min(top_k, t + 1)
                rows = np.argsort(-scores, kind="stable")[:count]
                logits = np.einsum("hd,shd->hs", q[b, t], k[b, rows]) * block.attention.scale
                target = np.mean([softmax(head) for head in logits], axis=0)
                losses.append((target * np.log(target / softmax(scores[rows]))).sum())
        total += np.mean(losses)
        attended = attend(block, x, positions, shared)
        shared = attended.shared
        h = h + attended.update
        h = h + block.mlp(block.post_norm(h))
    return total


@pytest.mark.parametrize("top_k", [None, SMALL.index_top_k])
def test_index_loss_equals_a_loop_over_queries(top_k):
    model = small_model()
    attend = CausalWithIndexLoss(8, "xla") if top_k is None else SparseWithIndexLoss(top_k, 8)
    features = jax.jit(lambda tokens: run_layers(model, tokens, attend))(TOKENS)
    assert features.index_loss == pytest.approx(divergence_by_hand(model, top_k), rel=1e-4)


def test_losses_do_not_change_the_forward_pass():
    model = small_model()
    with_loss = run_layers(model, TOKENS, SparseWithIndexLoss(6, 8))
    without = run_layers(model, TOKENS, Sparse(6, 8))
    np.testing.assert_allclose(with_loss.h, without.h, atol=1e-6, rtol=0)
    assert without.index_loss == 0
    np.testing.assert_array_equal(with_loss.expert_load, without.expert_load)
    assert (with_loss.expert_load.sum(axis=1) == TOKENS.size * SMALL.experts_per_token).all()


def test_dropout_keeps_the_mean_and_differs_between_sites():
    dropout = ResidualDropout(jax.random.key(0), 0.25)
    ones = jnp.ones((4, 50, 50))
    dropped = dropout(ones, 0)
    np.testing.assert_allclose(np.unique(dropped), [0, 4 / 3], rtol=1e-6)
    assert np.mean(dropped) == pytest.approx(1, abs=0.02)
    assert (np.asarray(dropped) != np.asarray(dropout(ones, 1))).any()
    assert ResidualDropout(jax.random.key(0), 0.0)(ones, 0) is ones


def test_uniform_logits_cost_eight_bits():
    losses, log_z = token_losses(jnp.zeros((1, 3, 256)), jnp.zeros((1, 3), jnp.int32))
    np.testing.assert_allclose(losses / np.log(2), 8, rtol=1e-6)
    np.testing.assert_allclose(log_z, np.log(256), rtol=1e-6)
