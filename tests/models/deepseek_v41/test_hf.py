"""Loading of published DeepSeek-V4.1 checkpoints: sizes, names, quantised tensors, words."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dhisparse_jax.configs import DEEPSEEK_V4_1_FLASH, V41Config
from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.attached.load import is_attached, load_attached
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.convert import convert
from dhisparse_jax.models.deepseek_v41.hf_config import parse_v41_config
from dhisparse_jax.models.deepseek_v41.hf_tensors import published_v41_shapes
from dhisparse_jax.models.deepseek_v41.words import word_ids
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.registry import load
from tests.support import numpy_v41
from tests.support.quantised import exact, quantise, write_tensors
from tests.support.small_v41 import FIXTURE, RAW, TEXT, loaded

OTHER = ("image_start", "layers.0.ffn.gate.bias_vl", "mtp.0.ffn.gate.bias_vl")
RELEASED_TEXT = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}
RELEASED = {
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": RELEASED_TEXT,
    "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32},
}
"""V4.1-Flash, with the sizes and names of the published configuration."""


@pytest.fixture(scope="module")
def tensors():
    return load_file(FIXTURE / "model.safetensors")


def write(directory, tensors, text=None, **changes):
    raw = RAW | {"text_config": TEXT | (text or {})} | changes
    (directory / "config.json").write_text(json.dumps(raw))
    write_tensors(directory / "model.safetensors", tensors)
    shutil.copy(FIXTURE / "tokenizer.json", directory)


def assert_same(one, other):
    flat, others = flatten(params_of(one)), flatten(params_of(other))
    assert flat.keys() == others.keys()
    for name, leaf in flat.items():
        assert np.array_equal(leaf, others[name]), name


def test_sizes_are_read():
    config = loaded().config
    assert isinstance(config, V41Config)
    assert config.groups == ((0, 1, 2), (3, 4, 5))
    assert config.rates == (0, 3, 3, 1, 1, 1)
    assert (config.entry_sources, config.index_sources) == ((1, 3), (1, 3, 5))
    assert (config.candidate_blocks, config.candidate_block) == (3, 3)
    assert (config.rope_theta, config.compress_theta, config.norm_eps) == (1e3, 2e4, 1e-20)


def test_a_released_configuration_is_the_preset():
    served = {"kv_format": "fp4", "index_format": "fp4"}
    assert dataclasses.replace(parse_v41_config(RELEASED), **served) == DEEPSEEK_V4_1_FLASH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"gate_temp": 2.0}, "gate_temp is 2.0"),
        ({"compress_ratios": [0, 3, 3]}, "compress_ratios is no list of 6 layers"),
        ({"compress_ratios": [0, 3, 3, 1, 1, "1"]}, "expected whole numbers"),
        ({"kv_source_layer_ids": None}, "kv_source_layer_ids is None"),
        ({"kv_source_layer_ids": [1, 3, 4]}, "index_source_layer_ids .* lacks a source"),
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id is 1; only the last source"),
        ({"compress_ratios": [0, 3, 5, 1, 1, 1]}, "compress_ratios of layers 1 to"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size is 1"),
        ({"engram_num_embeddings": [1, 2]}, "engram_num_embeddings is"),
        ({"engram_conv_kernel": 4}, "engram_conv_kernel"),
        ({"sliding_window": None}, "sliding_window is None"),
    ],
)
def test_what_is_not_implemented_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_v41_config(RAW | {"text_config": TEXT | changes})
    assert "\n" not in str(raised.value)


def test_what_is_not_of_the_text_path_is_left_out_and_named():
    found = load(str(FIXTURE))
    assert found.unused == OTHER
    assert len(found.drafts) == 72
    assert load_hf(FIXTURE).unused == tuple(sorted((*OTHER, *found.drafts)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.attn.indexer.wk.weight"), "lacks 1 tensors .*indexer.wk.weight"),
        (
            lambda t: t.update({"layers.5.attn.indexer.wk.weight": t["norm.weight"]}),
            "1 tensors too many: layers.5.attn.indexer.wk.weight",
        ),
        (
            lambda t: t.update(
                {"layers.1.engram.embed.weight": t["layers.1.engram.embed.weight"][:-1]}
            ),
            "engram.embed.weight",
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


def test_quantised_tensors_are_what_they_stand_for(tmp_path, tensors):
    """As released: blocks of 32 x 32, experts of 4 bits, tables of n-grams by parts of rows."""
    stored, plain = {}, {}
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "engram_head_dim": 40}
    raw = RAW | {"text_config": TEXT | sizes}
    shapes, rng = published_v41_shapes(parse_v41_config(raw)), np.random.default_rng(0)
    floats = ("compressor", "gate", "hc_", "weights_proj", "norm", "head", "indexer.wk")
    for name, shape in shapes.items():
        values = (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        stored[name] = plain[name] = values
        one = name == "embed.weight" or any(part in name for part in floats)
        if len(shape) == 2 and not one and not name.endswith(("q_weight", "k_weight")):
            form = "fp4" if ".experts." in name else "fp8-e8m0-32"
            weights = FORMATS["fp8-rows" if "engram.embed" in name else form]
            stored[name], scales = quantise(values, weights)
            stored[name.removesuffix(".weight") + ".scale"] = scales
            plain[name] = exact(stored[name], scales, weights).astype(np.float32)
    folders = [tmp_path / "stored", tmp_path / "plain"]
    quantisation = {"quantization_config": RELEASED["quantization_config"]}
    for folder, held, more in zip(folders, (stored, plain), (quantisation, {}), strict=True):
        folder.mkdir()
        write(folder, held, sizes, **more)
    expected = load_hf(folders[1]).model
    kept = load_hf(folders[0])
    assert (kept.config.expert_format, kept.config.table_format) == ("fp4", "fp8-rows")
    x = jnp.asarray(rng.normal(size=(1, 6, 64)), jnp.float32)
    ours = kept.model.layers[4].mlp(x, jnp.zeros((1, 6), jnp.int32))
    mine = expected.layers[4].mlp(x, jnp.zeros((1, 6), jnp.int32))
    assert np.abs(ours - mine).max() < 1e-5
    rows = jnp.arange(40, dtype=jnp.int32)
    for layer in TEXT["engram_layer_ids"]:
        table = kept.model.layers[layer].engram.table
        assert np.array_equal(table(rows), expected.layers[layer].engram.table(rows))
    loose = flatten(params_of(load_hf(folders[0], stored_experts=False).model))
    for name, leaf in flatten(params_of(expected)).items():
        if name in loose:
            assert np.array_equal(loose[name], leaf), name
    assert sorted(loose.keys() ^ flatten(params_of(expected)).keys()) == sorted(
        f"layers.{layer}.engram.table.{part}"
        for layer in TEXT["engram_layer_ids"]
        for part in ("numbers", "scales", "weight")
    )


def test_a_conversion_loads_without_the_published_files(tmp_path):
    """Also the drafter that is attached, and nothing but one that fits."""
    source, own = tmp_path / "source", tmp_path / "own"
    shutil.copytree(FIXTURE, source)
    assert convert(source, own).unused == OTHER
    shutil.rmtree(source)
    config, model = load_checkpoint(own)
    assert config == loaded().config
    assert_same(model, loaded())
    assert is_attached(own)
    draft, expected = load_attached(own, config), load_attached(FIXTURE, config)
    assert draft.config == expected.config
    assert_same(draft.model, expected.model)
    sizes = json.loads((own / "draft" / "config.json").read_text())
    (own / "draft" / "config.json").write_text(json.dumps(sizes | {"taps": [9]}))
    with pytest.raises(UserError, match=r"draft/config.json: the draft reads layer 9 of the"):
        load_attached(own, config)


def test_tokens_that_spell_the_same_are_one_word():
    tokenizer = Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    words = word_ids(tokenizer)
    same = lambda *texts: len({int(words[tokenizer.token_to_id(text)]) for text in texts}) == 1
    assert same("the", "The")
    assert same("café", "Café", "cafe")
    assert same("1", "①")
    assert not same("1", "2")
    ids = {}
    keys = [numpy_v41.word_key(tokenizer.decode([i], False)) for i in range(len(words))]
    assert words.tolist() == [ids.setdefault(key, len(ids)) for key in keys]


def test_words_need_the_tokenizer(tmp_path, tensors):
    write(tmp_path, tensors)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing; tables of n-grams need it"):
        load_hf(tmp_path)
    write(tmp_path, tensors, {"engram_compressed_vocab_size": TEXT["vocab_size"]})
    with pytest.raises(UserError, match=r"spell \d+ words, but the tables .* for 87 tokens and 87"):
        load_hf(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    words = load_hf(tmp_path).model.word_of[...]
    assert words.tolist() == list(range(TEXT["vocab_size"]))
