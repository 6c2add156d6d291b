"""Quantised and renamed checkpoints as models, and broken ones."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.families import family_of
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.hf import load_hf, read_config
from dhisparse_jax.models.hf_config import parse_config
from dhisparse_jax.models.hf_names import canonical_name
from dhisparse_jax.models.hf_tensors import published_shapes
from dhisparse_jax.models.params import abstract_params, flatten, params_of
from tests.support.checkpoints import (
    PUBLISHED,
    deepseek_name,
    quantised_tensors,
    random_tensors,
    write_shards,
)
from tests.support.quantised import exact, write_tensors
from tests.support.small_glm import FIXTURES

# Two layers, sizes that 128 and 32 do not divide, and 4-bit experts fit too.
SIZES = PUBLISHED | {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "hidden_size": 160,
    "moe_intermediate_size": 96,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
KV = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
KINDS = {"glm": ("fp8", "fp8"), "v4": ("fp8-e8m0", "fp4"), "v4.1": ("fp8-e8m0-32", "fp4")}


def write(directory, kind="glm", changes=lambda tensors: None, **entries):
    """A quantised checkpoint; returns its tensors, and what they stand for."""
    dense, experts = KINDS[kind]
    block = FORMATS[dense].block
    raw = SIZES | {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    (directory / "config.json").write_text(json.dumps(raw | entries))
    tensors, plain = quantised_tensors(SIZES, dense, experts)
    changes(tensors)
    write_tensors(directory / "model.safetensors", tensors)
    return tensors, plain


def write_plain(directory, tensors):
    (directory / "config.json").write_text(json.dumps(SIZES | {"quantization_config": None}))
    write_tensors(directory / "model.safetensors", tensors)


def logits(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 24)), jnp.int32)
    return np.asarray(jax.jit(lambda tokens: forward(model, tokens, mode="sparse"))(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_checkpoints_are_what_they_stand_for(tmp_path, kind):
    """Dequantised: bit by bit. Stored: the same logits but for the rounding of sums."""
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantised.mkdir()
    plain.mkdir()
    _, stands_for = write(quantised, kind)
    write_plain(plain, stands_for)
    reference = load_hf(plain)
    found = load_hf(quantised, stored_experts=False)
    expected = flatten(params_of(reference.model))
    for name, array in flatten(params_of(found.model)).items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    stored = load_hf(quantised)
    assert stored.config.expert_format == KINDS[kind][1]
    assert found.config == dataclasses.replace(stored.config, expert_format="float")
    difference = np.abs(logits(stored.model) - logits(reference.model)).max()
    assert 0 < difference < 2e-5


def test_stored_experts_are_the_bytes_of_the_file(tmp_path):
    tensors, _ = write(tmp_path, "v4")
    stored = load_hf(tmp_path).model.layers[1].mlp.stored
    np.testing.assert_array_equal(stored.down.numbers[3], tensors[DOWN])
    scales = np.asarray(stored.down.scales[3])
    np.testing.assert_array_equal(
        scales.view(np.uint8), tensors[f"{DOWN}_scale_inv"].view(np.uint8)
    )


def test_dequantised_weights_get_the_compute_dtype(tmp_path):
    write(tmp_path, dtype="bfloat16")
    wide, narrow = (load_hf(tmp_path, dtype=dtype).model for dtype in (jnp.float32, jnp.bfloat16))
    assert wide.layers[0].attention.kv_a.kernel.dtype == jnp.float32
    assert narrow.layers[0].attention.kv_a.kernel.dtype == jnp.bfloat16
    assert wide.layers[1].mlp.stored.up.numbers.dtype == jnp.float8_e4m3fn


def test_deepseek_names_mean_the_same(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    tensors, _ = write(ours)
    write(theirs)
    renamed = {deepseek_name(name): tensor for name, tensor in tensors.items()}
    renamed["mtp.0.enorm.weight"] = np.ones(3, np.float32)
    write_tensors(theirs / "model.safetensors", renamed)
    expected, found = load_hf(ours), load_hf(theirs)
    assert found.unused == ("mtp.0.enorm.weight",)
    for name, array in flatten(params_of(found.model)).items():
        np.testing.assert_array_equal(array, flatten(params_of(expected.model))[name])


def test_every_name_has_one_in_deepseeks_convention():
    names = [*published_shapes(parse_config(PUBLISHED)), f"{KV}_scale_inv", f"{DOWN}_scale_inv"]
    theirs = {deepseek_name(name) for name in names}
    assert len(theirs) == len(names)
    assert not theirs & set(names)
    assert sorted(canonical_name(name) for name in theirs) == sorted(names)
    assert "layers.1.ffn.experts.3.w2.scale" in theirs


def refused(directory, **options):
    with pytest.raises(UserError) as raised:
        load_hf(directory, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def change(name, value):
    def edit(tensors):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value(tensors[name]) if callable(value) else value

    return edit


def poison(scales):
    scales = scales.copy()
    scales[0, -1] = np.nan
    return scales


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{KV}_scale_inv", None, f"{KV} is F8_E4M3 without scales; neither {KV}_scale_inv nor"),
        (f"{KV}_scale_inv", poison, f"{KV}_scale_inv is nan at [0, 1]"),
        (f"{KV}_scale_inv", np.negative, f"{KV}_scale_inv is -0"),
        (f"{DOWN}_scale_inv", poison, "down_proj.weight_scale_inv is nan"),
        (
            f"{KV}_scale_inv",
            np.ones((2, 2), np.float32),
            f"{KV}_scale_inv is [2, 2], expected [1, 2]",
        ),
        (f"{KV}_scale_inv", np.ones((1, 2), np.int32), "scales are I32, not one of F32, F8_E8M0"),
        (KV, np.zeros((3, 3), ml_dtypes.float8_e4m3fn), f"{KV} is [3, 3], expected [20, 160]"),
        (KV, np.zeros((20, 160), np.int32), f"{KV} is I32, not one of BF16, F16, F32"),
        (DOWN, np.zeros((160, 96), np.float32), "tensors too many"),
    ],
)
def test_broken_quantised_tensors_are_named(tmp_path, name, value, message):
    write(tmp_path, changes=change(name, value))
    assert message in refused(tmp_path)
    assert "model.safetensors" in refused(tmp_path)


def test_names_are_those_of_the_files(tmp_path):
    def damage(tensors):
        tensors[f"{KV}_scale_inv"] = poison(tensors[f"{KV}_scale_inv"])
        for name in list(tensors):
            tensors[deepseek_name(name)] = tensors.pop(name)

    write(tmp_path, changes=damage)
    message = refused(tmp_path)
    assert "model.safetensors: layers.0.attn.wkv_a.scale is nan at [0, 1]" in message


def test_experts_of_several_formats_cannot_stay_stored(tmp_path):
    def mix(tensors):
        tensors[DOWN] = np.zeros((160, 96), np.float32)
        del tensors[f"{DOWN}_scale_inv"]

    write(tmp_path, changes=mix)
    assert f"{DOWN} is not quantised as" in refused(tmp_path)
    assert load_hf(tmp_path, stored_experts=False).config.expert_format == "float"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "expected two sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size is None"),
        ({"quant_method": "fp8", "group_size": 32}, "quantization_config: unknown entries"),
        ("fp8", "expected an object"),
    ],
)
def test_other_quantisations_are_refused(tmp_path, entry, message):
    write(tmp_path, quantization_config=entry)
    assert message in refused(tmp_path)
    assert "config.json" in refused(tmp_path)


def test_broken_shards_are_named(tmp_path):
    tensors = random_tensors()
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    first, second = write_shards(tmp_path, tensors)
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    last = sorted(tensors)[-1]
    assert f"{second} is cut off: {last} ends at byte {len(whole):,}" in refused(tmp_path)
    second.write_bytes(first.read_bytes())
    assert f"{second} lacks " in refused(tmp_path)
    second.unlink()
    assert f"{second}: no such file, but model.safetensors.index.json says" in refused(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for named in ({"a": 5}, {}):
        index.write_text(json.dumps({"weight_map": named}))
        assert f"{index} has no weight_map" in refused(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    tensors = random_tensors()
    first, second = write_shards(tmp_path, tensors)
    twice = sorted(tensors)[0]
    half = {name: tensors[name] for name in sorted(tensors)[len(tensors) // 2 :]}
    write_tensors(second, half | {twice: tensors[twice]})
    assert f"{twice} is in {first} and in {second}" in refused(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
        [],
        5,
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path, entry):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert f"{path} is " in refused(tmp_path)


def test_oracle_of_the_plain_tensors_is_the_product(tmp_path):
    tensors, plain = write(tmp_path, "v4")
    expected = exact(tensors[DOWN], tensors[f"{DOWN}_scale_inv"], FORMATS["fp4"])
    np.testing.assert_array_equal(plain[DOWN], expected.astype(np.float32))


@pytest.mark.parametrize(
    "name", ["glm_tiny", "deepseek_v32_tiny", "deepseek_v4_tiny", "deepseek_v41_tiny"]
)
def test_every_number_of_every_tensor_goes_to_one_place(name):
    config, _, _ = read_config(FIXTURES / name)
    family = family_of(config)
    used = dict.fromkeys(family.shapes(config), 0)
    for parts in family.pieces(config, flatten(abstract_params(config))).values():
        for part in parts:
            used[part.name] += math.prod(part.shape)
    assert used == {name: math.prod(shape) for name, shape in family.shapes(config).items()}
