"""Loading of published DeepSeek-V4 checkpoints: configurations, names, quantised tensors."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dhisparse_jax.configs import V4Config
from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.convert import convert
from dhisparse_jax.models.deepseek_v4.hf_config import parse_v4_config
from dhisparse_jax.models.deepseek_v4.hf_tensors import canonical_v4_name, published_v4_shapes
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import flatten, params_of
from tests.support.quantised import exact, quantise, write_tensors
from tests.support.small_v4 import FIXTURE

RAW = json.loads((FIXTURE / "config.json").read_text())
RELEASED = {
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""V4-Flash, in the form of DeepSeek's own configurations."""


@pytest.fixture(scope="module")
def tensors():
    """The fixture's tensors by DeepSeek's own names."""
    found = load_file(FIXTURE / "model.safetensors")
    return {canonical_v4_name(name): tensor for name, tensor in found.items()}


def write(directory, tensors, **changes):
    (directory / "config.json").write_text(json.dumps(RAW | changes))
    write_tensors(directory / "model.safetensors", tensors)


def assert_same(one, other):
    flat, others = flatten(params_of(one)), flatten(params_of(other))
    assert flat.keys() == others.keys()
    for name, leaf in flat.items():
        assert np.array_equal(leaf, others[name]), name


def test_sizes_are_read():
    config = load_hf(FIXTURE).config
    assert isinstance(config, V4Config)
    assert config.layer_kinds == ("all", "selected", "window", "all", "selected")
    assert config.groups == ((0, 1, 2, 3), (4,))
    assert (config.selected_rate, config.all_rate, config.window) == (3, 7, 5)
    assert (config.rope_theta, config.compress_theta, config.rope_dim) == (1e3, 2e4, 8)
    assert (config.yarn.factor, config.yarn.amplitude) == (4.0, 1.0)


def test_a_released_configuration_is_the_preset():
    from dhisparse_jax.configs import DEEPSEEK_V4_FLASH

    served = {"kv_format": "fp8", "index_format": "fp8"}
    assert dataclasses.replace(parse_v4_config(RELEASED), **served) == DEEPSEEK_V4_FLASH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["sliding_attention"] * 5}, "nothing to select"),
        ({"layer_types": ["full_attention"] * 5}, "holds 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "no list of 5 layers"),
        ({"compress_ratios": [0, 0, 3, 7, 3]}, "contradict each other"),
        ({"layer_types": None, "compress_ratios": [0, 0, 5, 7, 3]}, "holds 5; known are 0, 3, 7"),
        ({"layer_types": None}, "lacks layer_types"),
        ({"layer_types": [["window"]] * 5}, "layer_types holds"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "not a run of 'hash_moe'"),
        ({"qk_rope_head_dim": 4}, "rotated channels is not clear: 4 and 8"),
        ({"swiglu_alpha": 1.7}, "swiglu_alpha"),
        ({"o_groups": 3}, "do not split into 3 o_groups"),
    ],
)
def test_what_is_not_implemented_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_v4_config(RAW | changes)
    assert "\n" not in str(raised.value)


def test_two_rates_of_layers_are_those_of_the_two_kinds():
    ratios = {"layer_types": None, "compress_rates": None, "compress_ratios": [32, 2, 0, 32, 2, 0]}
    config = parse_v4_config(RAW | ratios)
    assert (config.selected_rate, config.all_rate) == (2, 32)
    assert config.layer_kinds == parse_v4_config(RAW).layer_kinds


def test_a_layer_too_many_is_refused(tmp_path, tensors):
    write(tmp_path, tensors | {"layers.5.attn_norm.weight": tensors["norm.weight"]})
    with pytest.raises(UserError, match=r"1 tensors too many: layers\.5\.attn_norm\.weight"):
        load_hf(tmp_path)


def test_names_of_deepseek_load_the_same_model(tmp_path, tensors):
    write(tmp_path, tensors)
    assert_same(load_hf(tmp_path).model, load_hf(FIXTURE).model)


def test_layers_of_a_drafter_are_left_out_and_named(tmp_path, tensors):
    extra = {"mtp.0.attn.wkv.weight": tensors["layers.0.attn.wkv.weight"]}
    write(tmp_path, tensors | extra)
    assert load_hf(tmp_path).unused == ("mtp.0.attn.wkv.weight",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.attn.attn_sink"), r"lacks 1 tensors .*layers.1.attn.attn_sink"),
        (lambda t: t.update({"layers.9x": t["norm.weight"]}), "1 tensors too many: layers.9x"),
        (
            lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.weight"]}),
            "tid2eid is",
        ),
        (
            lambda t: t.update(
                {"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].astype(np.float32)}
            ),
            "tid2eid is F32, not one of I32, I64",
        ),
        (
            lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"] + 4}),
            "tid2eid is 6 at .*; it can be 0 to 5",
        ),
    ],
)
def test_damage_is_named(tmp_path, tensors, change, message):
    damaged = dict(tensors)
    change(damaged)
    write(tmp_path, damaged)
    with pytest.raises(UserError, match=message) as raised:
        load_hf(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_quantised_tensors_are_what_they_stand_for(tmp_path, tensors):
    """As released: matrices in blocks of 128 with powers of two, experts of 4 bits in fours."""
    stored, plain = {}, dict(tensors)
    raw = RAW | {"hidden_size": 64, "moe_intermediate_size": 32}
    shapes, rng = published_v4_shapes(parse_v4_config(raw)), np.random.default_rng(0)
    for name, shape in shapes.items():
        if name.endswith("tid2eid"):
            stored[name] = plain[name] = tensors[name]
            continue
        values = (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        stored[name] = plain[name] = values
        floats = ("compressor", "gate", "hc_", "ape", "weights_proj", "norm", "embed", "head")
        if len(shape) == 2 and not any(part in name for part in floats):
            weights = FORMATS["fp4" if ".experts." in name else "fp8-e8m0"]
            stored[name], scales = quantise(values, weights)
            stored[name.removesuffix(".weight") + ".scale"] = scales
            plain[name] = exact(stored[name], scales, weights).astype(np.float32)
    folders = [tmp_path / "stored", tmp_path / "plain"]
    for folder, held in zip(folders, (stored, plain), strict=True):
        folder.mkdir()
        write(folder, held, hidden_size=64, moe_intermediate_size=32)
    expected = load_hf(folders[1]).model
    assert_same(load_hf(folders[0], stored_experts=False).model, expected)
    kept = load_hf(folders[0])
    assert kept.config.expert_format == "fp4"
    x = jnp.asarray(rng.normal(size=(1, 6, 64)), jnp.float32)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    for layer in (0, 3):
        ours = kept.model.layers[layer].mlp(x, tokens)
        assert np.abs(ours - expected.layers[layer].mlp(x, tokens)).max() < 1e-5


def test_a_conversion_loads_without_the_published_files(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FIXTURE, source)
    convert(source, tmp_path / "own")
    shutil.rmtree(source)
    config, model = load_checkpoint(tmp_path / "own")
    assert config == load_hf(FIXTURE).config
    assert_same(model, load_hf(FIXTURE).model)
    values = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(values | {"family": "other"}))
    with pytest.raises(UserError, match="family 'other'"):
        load_checkpoint(tmp_path / "own")


def test_a_checkpoint_of_another_type_names_those_that_load(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"model_type": "deepseek_v5"}))
    with pytest.raises(UserError, match=r"'deepseek_v32', 'deepseek_v4', .* are supported"):
        load_hf(tmp_path)


def test_sizes_that_cannot_be_are_refused():
    config = load_hf(FIXTURE).config
    for changes, message in (
        ({"rope_dim": 7}, "rope_dim is 7"),
        ({"experts_per_token": 9}, "exceeds the 6 experts"),
        ({"num_hash_layers": 6}, "exceeds the 5 layers"),
        ({"window": 0}, "window is 0"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(config, **changes)
