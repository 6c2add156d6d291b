import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.models.frequencies import rope_frequencies
from dhisparse_jax.models.glm.attend import causal_attention, sparse_attention
from dhisparse_jax.models.glm.attention import MlaAttention
from dhisparse_jax.models.glm.norms import LayerNorm, RmsNorm
from dhisparse_jax.models.glm.rope import rotate, rotate_first
from tests.support.small_glm import SMALL

F32 = jnp.dtype("float32")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_absorbed_and_expanded_forms_are_equal():
    attention = MlaAttention(SMALL, dtype=F32, rngs=nnx.Rngs(0))
    x, positions = draw(2, 9, SMALL.hidden_size), jnp.broadcast_to(jnp.arange(9), (2, 9))
    heads = causal_attention(attention.expand(x, positions), positions, attention.scale, chunk=4)
    everything = jnp.where(
        jnp.arange(9)[None, None] <= positions[..., None], jnp.arange(9)[None, None], -1
    )
    context, weights = sparse_attention(
        attention.project(x, positions), everything, attention.scale, chunk=4
    )
    np.testing.assert_allclose(
        attention.combine(context), attention.output(heads), atol=1e-5, rtol=1e-5
    )
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)


def test_row_is_normalised_latent_then_rotated_key():
    attention = MlaAttention(SMALL, dtype=F32, rngs=nnx.Rngs(0))
    x, r = draw(3, SMALL.hidden_size), SMALL.kv_lora_rank
    row = attention.project(x, jnp.asarray([0, 5, 90])).row
    kv = np.asarray(x) @ np.asarray(attention.kv_a.kernel[...])
    rms = np.sqrt((kv[:, :r] ** 2).mean(axis=1, keepdims=True) + SMALL.latent_norm_eps)
    np.testing.assert_allclose(row[:, :r], kv[:, :r] / rms, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        row[0, r:], kv[0, r:], atol=1e-6, rtol=1e-6
    )  # position 0 turns nothing
    norms = np.linalg.norm(row[:, r:], axis=1), np.linalg.norm(kv[:, r:], axis=1)
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_rotation_is_a_complex_product():
    x, positions, theta = draw(7, 8), np.arange(7) * 11, 1e4
    angles = positions[:, None] * theta ** (-np.arange(4) / 4)
    turned = (np.asarray(x[:, 0::2]) + 1j * np.asarray(x[:, 1::2])) * np.exp(1j * angles)
    y = rotate(x, jnp.asarray(positions), theta=theta)
    np.testing.assert_allclose(y[:, 0::2], turned.real, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(y[:, 1::2], turned.imag, atol=1e-4, rtol=1e-4)


def test_half_split_style_is_a_permutation_of_interleaved():
    x, positions = draw(5, 8), jnp.arange(5)
    order = np.r_[0:8:2, 1:8:2]
    split = rotate(x[:, order], positions, theta=1e4, style="half-split")
    np.testing.assert_allclose(
        split, rotate(x, positions, theta=1e4)[:, order], atol=1e-6, rtol=1e-6
    )


def test_only_the_first_channels_of_an_index_head_turn():
    x = draw(5, 3, 8)
    y = rotate_first(x, jnp.arange(5)[:, None], 4, theta=1e4, style="interleaved")
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    assert np.abs(y[1:, :, :4] - x[1:, :, :4]).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_computed_in_float32(dtype):
    x = (1000 + draw(4, 64)).astype(dtype)
    rms = RmsNorm(64, epsilon=1e-6, dtype=jnp.dtype(dtype), param_dtype=F32)
    layer = LayerNorm(64, epsilon=1e-6, dtype=jnp.dtype(dtype), param_dtype=F32)
    wide = np.asarray(x, np.float64)
    expected_rms = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True))
    centred = wide - wide.mean(axis=1, keepdims=True)
    expected_layer = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-6)
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-3
    assert rms(x).dtype == layer(x).dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(rms(x), np.float64), expected_rms, rtol=tolerance)
    np.testing.assert_allclose(
        np.asarray(layer(x), np.float64), expected_layer, rtol=tolerance, atol=tolerance
    )


def test_frequencies_are_those_of_published_implementations():
    """`1 / theta ** (arange(0, channels, 2) / channels)` of float32, as torch gives it."""
    published = (
        1.0,
        0.3981071710586548,
        0.15848931670188904,
        0.06309572607278824,
        0.025118863210082054,
    )
    assert rope_frequencies(20, 1e4)[:5] == published
    yarn = Yarn(factor=8.0, context=64, beta_fast=32.0, beta_slow=1.0, amplitude=1.0)
    stretched = np.array(rope_frequencies(20, 1e4, yarn))
    np.testing.assert_array_equal(stretched, stretched.astype(np.float32))
