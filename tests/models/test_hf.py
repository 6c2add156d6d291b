import json
import math
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dhisparse_jax.configs import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.hf_config import parse_config
from dhisparse_jax.models.params import flatten, loses_nothing, params_of
from dhisparse_jax.models.tensor_files import read_headers, read_rows
from tests.support.small_glm import FIXTURE

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
NORM = "model.layers.2.input_layernorm.weight"


@pytest.fixture
def checkpoint(tmp_path):
    """A copy that a test may damage, with a writer for changed tensors and for changed entries."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, tmp_path / name)
    return tmp_path


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory, **entries):
    raw = json.loads((directory / "config.json").read_text())
    raw = {name: value for name, value in (raw | entries).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw))


def assert_refused(directory, *parts):
    with pytest.raises(UserError) as raised:
        load_hf(directory)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_sizes_are_read():
    config, model, unused = load_hf(FIXTURE)
    assert isinstance(config, GlmConfig)
    assert config.groups == ((0,), (1, 2, 3), (4,))
    assert (config.norm_eps, config.latent_norm_eps, config.num_dense_layers) == (1e-5, 1e-6, 2)
    assert model.dtype == jnp.float32
    assert unused == ()


def test_shards_give_the_same_model(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, checkpoint / file)
    where = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": where}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, split = (flatten(params_of(load_hf(d)[1])) for d in (FIXTURE, checkpoint))
    assert whole.keys() == split.keys()
    assert all((whole[name] == split[name]).all() for name in whole)
    (checkpoint / "model-1.safetensors").unlink()
    assert_refused(
        checkpoint, "model-1.safetensors: no such file", "holds model.embed_tokens.weight"
    )


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float16"])
def test_half_precision_weights_are_kept_and_computed_in_float32_on_request(checkpoint, dtype):
    edit_config(checkpoint, dtype=dtype)
    edit_tensors(
        checkpoint,
        lambda tensors: tensors.update({n: t.astype(jnp.dtype(dtype)) for n, t in tensors.items()}),
    )
    model = load_hf(checkpoint, dtype=jnp.float32).model
    assert model.embedding.dtype == dtype
    assert model.layers[2].mlp.router.bias.dtype == jnp.float32
    tokens = jnp.asarray(np.load(FIXTURE / "inputs.npy")[:, :8], jnp.int32)
    logits = forward(model, tokens, mode="dense")[0]
    expected = np.load(FIXTURE / "logits.npy")[:8]
    assert 1e-6 < np.abs(logits - expected).max() < 0.1


def test_weights_that_are_more_than_the_configuration_says_are_not_rounded(checkpoint):
    edit_config(checkpoint, dtype="bfloat16")
    exact = np.asarray(load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"])
    for dtype in (None, jnp.float32):
        np.testing.assert_array_equal(load_hf(checkpoint, dtype=dtype).model.embedding, exact)
    assert load_hf(checkpoint, dtype=jnp.bfloat16).model.embedding.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("kind", "other", "nothing"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("int32", "int32", True),
        ("int32", "float32", False),
    ],
)
def test_what_a_dtype_loses(kind, other, nothing):
    assert loses_nothing(np.dtype(kind), np.dtype(other)) is nothing


def test_a_layer_too_many_is_no_mtp_layer(checkpoint):
    """It would be left out, and the model another one."""
    edit_config(
        checkpoint,
        num_hidden_layers=4,
        indexer_types=["full", "full", "shared", "shared"],
        mlp_layer_types=["dense"] * 2 + ["sparse"] * 2,
        layer_types=...,
    )
    assert_refused(checkpoint, "tensors too many: model.layers.4.")


def test_mtp_layers_are_ignored_and_named(checkpoint):
    extra = "model.layers.5.eh_proj.weight"
    edit_tensors(checkpoint, lambda tensors: tensors.update({extra: np.ones((2, 2), np.float32)}))
    assert load_hf(checkpoint).unused == (extra,)


def test_as_many_mtp_layers_as_the_configuration_says(checkpoint):
    extra = "model.layers.6.eh_proj.weight"
    edit_tensors(checkpoint, lambda tensors: tensors.update({extra: np.ones((2, 2), np.float32)}))
    edit_config(checkpoint, num_nextn_predict_layers=2)
    assert load_hf(checkpoint).unused == (extra,)
    edit_config(checkpoint, num_nextn_predict_layers=1)
    assert_refused(checkpoint, extra)


@pytest.mark.parametrize(("more", "ends"), [(7, (1, 7)), ([1, 9, 7], (1, 9, 7)), (None, (1,))])
def test_ids_that_end_a_text_are_those_of_both_files(checkpoint, more, ends):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert load_hf(checkpoint).config.eos_ids == ends


def test_a_bad_generation_config_is_refused(checkpoint):
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": "end"}')
    assert_refused(checkpoint, "generation_config.json: eos_token_id is 'end'")


def test_missing_tensors_are_named_with_their_shape(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.pop(NORM))
    assert_refused(checkpoint, "lacks 1 tensors", f"{NORM} [64]")


def test_only_the_first_missing_tensors_are_listed(checkpoint):
    def drop(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    edit_tensors(checkpoint, drop)
    assert_refused(checkpoint, "lacks 72 tensors", "and 69 more")


def test_left_over_tensors_are_named(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update(surprise=np.ones(2, np.float32)))
    assert_refused(checkpoint, "1 tensors too many: surprise in model.safetensors")


def test_wrong_shapes_are_named(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({NORM: np.ones(63, np.float32)}))
    assert_refused(checkpoint, f"model.safetensors: {NORM} is [63], expected [64]")


def test_other_types_of_numbers_are_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({NORM: np.ones(64, np.int32)}))
    assert_refused(checkpoint, f"model.safetensors: {NORM} is I32, not one of")


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_named(checkpoint, kind, value):
    def poison(tensors):
        tensors[NORM] = np.full_like(tensors[NORM], np.finfo(np.float16).min, kind)
        tensors[NORM][5] = value

    edit_tensors(checkpoint, poison)
    number = "nan" if np.isnan(value) else str(value)
    assert_refused(checkpoint, f"model.safetensors: {NORM} is {number} at [5]")


def test_the_row_of_a_block_is_that_of_the_tensor(checkpoint):
    name = "model.embed_tokens.weight"

    def poison(tensors):
        tensors[name][70, 3] = np.nan

    edit_tensors(checkpoint, poison)
    header = read_headers(checkpoint)[name]
    read_rows(header, slice(0, 70))
    with pytest.raises(UserError, match=r"embed_tokens.weight is nan at \[70, 3\]"):
        read_rows(header, slice(64, 128))


@pytest.mark.parametrize("kept", [0, 5, 1000, -3])
def test_truncated_files_are_refused(checkpoint, kept):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert_refused(
        checkpoint, "model.safetensors is " + ("cut off: " if kept < 0 else "damaged or not a")
    )


def test_missing_files_are_refused(checkpoint, tmp_path_factory):
    assert_refused(tmp_path_factory.mktemp("empty"), "config.json", "No such file")
    (checkpoint / "model.safetensors").unlink()
    assert_refused(checkpoint, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_invalid_configuration_files_are_refused(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    assert_refused(checkpoint, "config.json")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "llama"}, "config.json: model_type is 'llama'; only 'glm_moe_dsa'"),
        ({"model_type": ...}, "model_type is None"),
        ({"hidden_size": ...}, "lacks 1 entries: hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "mlp_layer_types"),
        ({"indexer_types": ["full"]}, "1 entries for 5 layers"),
        ({"indexer_types": 5}, "indexer_types"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"mlp_layer_types": 3}, "mlp_layer_types"),
        ({"dtype": 7}, "dtype"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"index_topk_pattern": 4, "indexer_types": ...}, "index_topk_pattern"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor is nan, expected a number"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob is 'no', expected true or false"),
        ({"layer_types": [["indexed_attention"]] * 5}, "layer_types holds more than"),
        ({"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "only 1.0 is supported"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1,000,000,000; more than 10,000",
        ),
        ({"n_routed_experts": 10**9}, "n_routed_experts is 1,000,000,000"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1,000,000,000"),
        ({"rope_parameters": PLAIN | {"scale_base": 512}}, "may change what the model computes"),
    ],
)
def test_unsupported_configurations_are_refused(checkpoint, entries, message):
    edit_config(checkpoint, **entries)
    assert_refused(checkpoint, message)


def test_rules_of_older_configurations_are_applied():
    raw = json.loads((FIXTURE / "config.json").read_text())
    for name in ("indexer_types", "mlp_layer_types", "rope_parameters", "dtype"):
        raw.pop(name)
    raw |= {
        "first_k_dense_replace": 1,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 2,
        "rope_theta": 5e5,
        "torch_dtype": "float16",
        "indexer_rope_interleave": False,
        "eos_token_id": [3, 4],
    }
    config = parse_config(raw)
    assert config.indexer_types == ("full", "full", "shared", "full", "shared")
    assert (config.num_dense_layers, config.rope_theta, config.param_dtype) == (1, 5e5, "float16")
    assert (config.index_rope_style, config.eos_ids) == ("half-split", (3, 4))
