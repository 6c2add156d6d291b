"""Conversion: the same weights, all or nothing, and loading without the published files."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax import arrays
from dhisparse_jax.errors import UserError
from dhisparse_jax.models import convert, registry
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.convert import PARTIAL
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import flatten, params_of
from tests.support.checkpoints import PUBLISHED, quantised_tensors, random_tensors
from tests.support.quantised import write_tensors

EXTRA = "model.layers.3.enorm.weight"
SIZES = PUBLISHED | {"moe_intermediate_size": 32, "eos_token_id": [3, 5], "bos_token_id": 0}


def write(directory, **tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SIZES))
    write_tensors(directory / "model.safetensors", random_tensors(raw=SIZES) | tensors)
    return directory


def assert_same_weights(found, expected):
    found, expected = flatten(params_of(found)), flatten(params_of(expected))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(
            np.asarray(array).view(np.uint8), np.asarray(expected[name]).view(np.uint8)
        )


@pytest.mark.parametrize("kind", ["fp8", pytest.param("fp4", marks=pytest.mark.slow)])
def test_quantised_weights_arrive_as_they_are(tmp_path, kind):
    """Bit for bit, whatever is computed in: a conversion rounds nothing that was not asked for."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(SIZES | {"dtype": "bfloat16"}))
    tensors, _ = quantised_tensors(SIZES, "fp8", kind)
    write_tensors(source / "model.safetensors", tensors)
    written = convert.convert(source, target)
    expected = {dtype: load_hf(source, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)}
    shutil.rmtree(source)
    for dtype, published in expected.items():
        config, model = load_checkpoint(target, dtype=dtype)
        assert config == published.config
        assert written.expert_format == config.expert_format == kind
        assert model.layers[0].attention.q_b.kernel.dtype == dtype
        assert_same_weights(model, published.model)


def test_a_converted_checkpoint_is_served_as_the_published_one(tmp_path):
    source = write(tmp_path / "source", **{EXTRA: np.ones(3, np.float32)})
    (source / "tokenizer.json").write_text("{}")
    written = convert.convert(source, tmp_path / "target")
    assert written.unused == (EXTRA,)
    document = json.loads((tmp_path / "target" / "conversion.json").read_text())
    assert document == {"unused_tensors": [EXTRA]}
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    for folder in (source, tmp_path / "target"):
        (folder / "tokenizer.json").unlink()
    ours, theirs = registry.load(str(tmp_path / "target")), registry.load(str(source))
    assert ours.eos == theirs.eos == (3, 5)
    assert ours.tokenizer.encode(b"a") == theirs.tokenizer.encode(b"a") == (97,)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", ["save_weights", "save_json", "copyfile"])
def test_an_interrupted_conversion_leaves_nothing_that_loads(tmp_path, monkeypatch, step):
    source, target = write(tmp_path / "source"), tmp_path / "target"
    (source / "tokenizer.json").write_text("{}")
    owner = shutil if step == "copyfile" else convert
    whole = getattr(owner, step)

    def die(*args, **options):
        whole(*args, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, die)
        with pytest.raises(Killed):
            convert.convert(source, target)
    assert not target.exists()
    partial = tmp_path / f"target{PARTIAL}"
    assert partial.is_dir()
    with pytest.raises(UserError, match=r"config\.json"):
        load_checkpoint(partial)
    convert.convert(source, target)
    assert not partial.exists()
    assert_same_weights(load_checkpoint(target)[1], load_hf(source).model)


def test_a_target_that_exists_is_not_touched(tmp_path):
    source, target = write(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(UserError, match="exists; name a new folder"):
        convert.convert(source, target)
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_where_nothing_can_be_written_is_said(tmp_path):
    source = write(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        convert.convert(source, tmp_path / "file" / "target")


def test_files_of_weights_may_be_large(tmp_path, monkeypatch):
    """The size of a file is a bound for the bundled model only."""
    asked = []
    monkeypatch.setattr(
        convert, "save_weights", lambda path, flat, file_bytes: asked.append(file_bytes)
    )
    with pytest.raises(UserError, match="cannot write"):  # nothing made the folder
        convert.convert(write(tmp_path / "source"), tmp_path / "target")
    assert asked[0] > 100 * arrays.DATA_FILE_BYTES
