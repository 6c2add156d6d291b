import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.configs import TINY
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import load_checkpoint, save_checkpoint
from dhisparse_jax.models.params import abstract_params, flatten, params_of, unflatten
from tests.support.small_glm import SMALL, small_model


@pytest.fixture(scope="module")
def model():
    return small_model()


def test_weights_return_as_they_were(tmp_path, model):
    save_checkpoint(tmp_path, model.config, params_of(model))
    config, restored = load_checkpoint(tmp_path)
    assert config == model.config
    before, after = flatten(params_of(model)), flatten(params_of(restored))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])


def test_weights_are_rounded_to_the_configured_dtype_and_computed_in_another(tmp_path, model):
    config = dataclasses.replace(model.config, param_dtype="bfloat16")
    save_checkpoint(tmp_path, config, params_of(model))
    _, restored = load_checkpoint(tmp_path, dtype=jnp.float32)
    assert restored.dtype == jnp.float32
    assert restored.embedding.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        restored.embedding[...], model.embedding[...].astype(jnp.bfloat16)
    )
    assert restored.layers[1].mlp.router.bias.dtype == jnp.float32


def test_saving_again_replaces(tmp_path, model):
    save_checkpoint(tmp_path, model.config, params_of(model))
    other = small_model(seed=1)
    save_checkpoint(tmp_path, other.config, params_of(other))
    _, restored = load_checkpoint(tmp_path)
    np.testing.assert_array_equal(restored.embedding[...], other.embedding[...])


def test_no_file_is_large(tmp_path):
    rng = np.random.default_rng(0)  # random bits do not compress
    like = abstract_params(TINY)
    flat = {
        name: rng.integers(0, 2**15, x.shape).astype(np.uint16).view(x.dtype)
        if x.dtype.itemsize == 2
        else np.zeros(x.shape, x.dtype)
        for name, x in flatten(like).items()
    }
    save_checkpoint(tmp_path, TINY, unflatten(flat, like))
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) > 9e6
    assert max(sizes) < 6e6


def refused(directory):
    with pytest.raises(UserError) as raised:
        load_checkpoint(directory)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_absence_and_damage_are_reported(tmp_path, model):
    assert "config.json" in refused(tmp_path)
    save_checkpoint(tmp_path, model.config, params_of(model))
    for path in (tmp_path / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:50])
    assert "damaged" in refused(tmp_path)


def test_other_sizes_are_reported(tmp_path, model):
    save_checkpoint(tmp_path, model.config, params_of(model))

    def claim(**changes):
        raw = dataclasses.asdict(dataclasses.replace(SMALL, **changes))
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return refused(tmp_path)

    assert "is [4, 32, 32], expected [5, 32, 32]" in claim(num_experts=5)
    assert "lacks" in claim(indexer_types=("full",) * 3)
    assert "too many" in claim(indexer_types=("full", "shared", "shared"))
    (tmp_path / "config.json").write_text(json.dumps({"layers": 3}))
    assert "unknown entries: layers" in refused(tmp_path)
