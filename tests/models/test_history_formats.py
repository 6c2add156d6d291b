"""Models that keep their history in fp8: sizes, rotation, and the same bits under every policy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.configs import DEEPSEEK_V3_2, GLM_5_3, TINY, derive_indexer_types
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.glm import decode
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.hadamard import hadamard, rotate_hadamard
from dhisparse_jax.models.hf_config import parse_config
from tests.support.checkpoints import PUBLISHED
from tests.support.small_glm import small_model


def geometry(config, rows, keys):
    """What a model of these sizes needs; its weights are never made."""
    config = dataclasses.replace(config, kv_format=rows, index_format=keys)
    return dataclasses.replace(serve(small_model(), "float32")[0], config=config).geometry


GLM_5 = dataclasses.replace(GLM_5_3, indexer_types=derive_indexer_types(78))


@pytest.mark.parametrize(
    ("config", "form", "size"),
    [
        (DEEPSEEK_V3_2, "fp8", 48_068),
        (GLM_5, "fp8", 61_464),
        (GLM_5, "bfloat16", 109_824),
        (GLM_5_3, "fp8", 53_940),
        (GLM_5_3, "bfloat16", 95_232),
    ],
)
def test_bytes_per_token_are_the_published_ones(config, form, size):
    assert geometry(config, form, form).position_bytes == size


def test_sizes_of_glm():
    """FlashMLA's rows, keys with a scale, and four layers in a record of 2,688 bytes."""
    of = geometry(GLM_5_3, "fp8", "fp8")
    assert (4 * of.row.words, of.key_bytes) == (656, 132)
    cfg = HierarchyConfig(
        geometry=of, policy=Policy.FIXED, requests=1, capacity=4096, hot_rows=2048
    )
    assert 4 * cfg.record_words(2) == 2688


def test_presets_say_what_is_kept():
    assert (GLM_5_3.kv_format, GLM_5_3.index_format) == ("fp8", "fp8")
    assert geometry(TINY, TINY.kv_format, TINY.index_format).row.name == "float32"


@pytest.mark.parametrize("changes", [{"kv_format": "fp4"}, {"index_format": "int8"}])
def test_other_formats_are_refused(changes):
    with pytest.raises(UserError, match="leave it out, or use one of float32, bfloat16, fp8"):
        dataclasses.replace(TINY, **changes)


def test_a_width_without_a_hadamard_matrix_is_refused():
    with pytest.raises(UserError, match="needs a power of two as index_dim, not 48; use"):
        dataclasses.replace(TINY, index_dim=48, index_format="fp8")


@pytest.mark.parametrize(
    ("changes", "powers"),
    [
        ({}, False),
        ({"model_type": "deepseek_v32"}, True),
        ({"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}}, True),
        ({"model_type": "deepseek_v32", "scale_fmt": "float32"}, False),
    ],
)
def test_scales_are_powers_of_two_where_they_are_published_so(changes, powers):
    config = parse_config(PUBLISHED | changes)
    assert config.power_scales is powers
    of = geometry(config, "fp8", "fp8")
    assert (of.row.dtype.power_scales, of.index_power_scales) == (powers, powers)
    assert geometry(config, "float32", "float32").index_power_scales is False


def test_hadamard_is_sylvesters():
    matrix = np.ones((1, 1))
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    np.testing.assert_array_equal(hadamard(128), matrix)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_keeps_products_and_spreads_outliers(dtype):
    rng = np.random.default_rng(0)
    given = jnp.asarray(rng.normal(size=(2, 5, 128)), dtype)
    turned = rotate_hadamard(given)
    assert turned.dtype == given.dtype
    dots = lambda x: np.asarray(x[0], np.float64) @ np.asarray(x[1], np.float64).T
    tolerance = {"float32": 1e-4, "bfloat16": 0.5}[dtype]
    np.testing.assert_allclose(dots(turned), dots(given), atol=tolerance)
    outlier = rotate_hadamard(jnp.eye(128, dtype=dtype)[5])
    np.testing.assert_allclose(np.abs(np.asarray(outlier, np.float64)), 128**-0.5, rtol=2e-3)


TOKENS = np.random.default_rng(3).integers(0, 256, 60).tolist()


def logits(policy, queries=1, split=24, **formats):
    """Of a small GLM, through prefill and decode."""
    model, params = serve(small_model(), "float32", **formats)
    cfg = HierarchyConfig(
        geometry=model.geometry,
        policy=Policy(policy),
        requests=2,
        capacity=64,
        queries=queries,
        hot_rows=5,
    )
    engine = Engine(model, params, cfg, chunk=16)
    pieces = forced_logits(engine, TOKENS, split)
    return np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])


FP8 = {"kv_format": "fp8", "index_format": "fp8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "queries", "formats"),
    [
        ("fixed", 1, FP8),
        ("adaptive", 4, FP8),
        ("adaptive", 1, {"kv_format": "fp8", "index_format": "bfloat16"}),
        ("fixed", 4, {"kv_format": "bfloat16", "index_format": "fp8"}),
    ],
)
def test_policies_give_the_same_bits(policy, queries, formats):
    found = logits(policy, queries, **formats)
    np.testing.assert_array_equal(found, logits("resident", queries, **formats))
    # Rounding shows: else nothing would be compared.
    assert np.median(np.abs(found - logits("resident", queries)).max(axis=1)) > 1e-3


@pytest.mark.slow
def test_rotation_alone_changes_no_selection(monkeypatch, new_programs):
    """In float32, keys and queries that are both rotated select what they select as they are."""
    plain = logits("resident", split=60)
    calls = []

    def rotated(index, _):
        calls.append(index)
        return dataclasses.replace(
            index, queries=rotate_hadamard(index.queries), keys=rotate_hadamard(index.keys)
        )

    monkeypatch.setattr(decode, "in_basis", rotated)
    new_programs()
    np.testing.assert_allclose(logits("resident", split=60), plain, atol=1e-4)
    assert calls
    new_programs()
