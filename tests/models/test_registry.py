"""Models by name: what `--model` takes, and what comes with the weights."""

import shutil

import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models import registry
from dhisparse_jax.models.tokenizer import ByteTokenizer
from tests.support.checkpoints import CONTEXT, write_own, write_published


def test_own_checkpoint_has_a_start_token_that_also_ends(tmp_path):
    write_own(tmp_path, bos_token_id=0, eos_token_id=[3])
    loaded = registry.load(str(tmp_path))
    assert loaded.tokenizer.encode(b"a") == (0, 97)
    assert loaded.eos == (3, 0)
    assert (loaded.context, loaded.model.vocabulary) == (CONTEXT, 256)
    assert loaded.model.geometry.row.dtype == "float32"


def test_published_checkpoint_is_taken_as_it_is(tmp_path):
    write_published(tmp_path)
    loaded = registry.load(str(tmp_path), "bfloat16")
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.tokenizer.encode(b"a") == (97,)
    assert loaded.eos == ()
    assert loaded.name == str(tmp_path)
    assert loaded.model.geometry.row.dtype == "bfloat16"


def test_bundled_model_loads():
    loaded = registry.load("tiny")
    assert loaded.name == "tiny"
    assert loaded.context == 8192
    assert loaded.eos == (0,)
    assert loaded.tokenizer.encode(b"\n") == (0, 10)


def test_a_name_without_a_model_is_refused():
    with pytest.raises(UserError, match=r"unknown model none/such: .* \(tiny\)"):
        registry.load("none/such")


def test_a_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="nor the folder of a checkpoint"):
        registry.load(str(path))


@pytest.mark.parametrize(
    ("write", "weights"), [(write_own, "params"), (write_published, "model.safetensors")]
)
def test_a_format_that_a_model_has_not_is_refused_before_its_weights_are_read(
    tmp_path, write, weights
):
    write(tmp_path)
    shutil.move(tmp_path / weights, tmp_path / "elsewhere")
    (tmp_path / weights).mkdir()
    with pytest.raises(UserError, match="kv_format is 'fp4', for which other models were trained"):
        registry.load(str(tmp_path), kv_format="fp4")
