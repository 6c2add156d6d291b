import dataclasses
import json
import math

import jax
import pytest

from dhisparse_jax.configs import (
    DEEPSEEK_V3_2,
    GLM_5_3,
    PRESETS,
    TINY,
    config_from_values,
    derive_indexer_types,
)
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.hf_config import parse_config
from dhisparse_jax.models.hf_tensors import published_shapes
from dhisparse_jax.models.params import abstract_params


def bytes_of(config):
    leaves = jax.tree.leaves(abstract_params(config))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def test_published_pattern_is_three_full_then_every_fourth():
    types = derive_indexer_types(78, freq=4, offset=3)
    full = [i for i, kind in enumerate(types) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert len(full) == 21


def test_default_rule_makes_every_layer_full():
    assert set(derive_indexer_types(5)) == {"full"}


def test_pattern_wins_over_the_rule():
    assert derive_indexer_types(3, freq=4, offset=3, pattern="FSF") == ("full", "shared", "full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "FS"}, "must be 3 letters"),
        ({"pattern": "FXS"}, "F or S"),
        ({"freq": 0}, "freq is 0"),
    ],
)
def test_bad_rule_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        derive_indexer_types(3, **arguments)


def test_groups_are_runs_after_a_full_layer():
    assert TINY.groups == ((0,), (1,), (2, 3, 4, 5), (6, 7))
    assert GLM_5_3.groups[:4] == ((0,), (1,), (2, 3, 4, 5), (6, 7, 8, 9))
    assert GLM_5_3.groups[-1] == (74, 75, 76, 77)


def test_glm_5_3_has_the_published_size_without_allocating_it():
    # Seven layers hold one of each kind; 78 would only repeat them, at a second each.
    types = derive_indexer_types(7, freq=4, offset=3)
    params = abstract_params(dataclasses.replace(GLM_5_3, num_layers=7, indexer_types=types))
    count = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
    layers = params.pop("layers")
    dense, shared, full = (count(layers[i]) for i in (0, 3, 6))
    assert count(params) + 3 * dense + 57 * shared + 18 * full == 743_377_019_904
    mtp = full + 2 * 6144**2 + 3 * 6144  # an expert layer, eh_proj, enorm, hnorm and a norm
    assert 743.377e9 + mtp == pytest.approx(753.33e9, rel=1e-5)


def test_deepseek_v3_2_has_the_published_size():
    sizes = map(math.prod, published_shapes(DEEPSEEK_V3_2).values())
    assert sum(sizes) == pytest.approx(671.9e9, abs=0.05e9)
    assert DEEPSEEK_V3_2.attention_scale == pytest.approx(0.135234, abs=1e-6)


def test_a_released_configuration_is_the_preset():
    """Of DeepSeek-V3.2-Exp, without what has no effect."""
    released = {
        "model_type": "deepseek_v32", "torch_dtype": "bfloat16", "vocab_size": 129280,
        "max_position_embeddings": 163840, "num_hidden_layers": 61, "hidden_size": 7168,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "intermediate_size": 18432, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
        "num_nextn_predict_layers": 1, "attention_bias": False, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    served = dataclasses.replace(parse_config(released), kv_format="fp8", index_format="fp8")
    assert served == DEEPSEEK_V3_2


def test_tiny_fits_its_file_size():
    assert bytes_of(TINY) <= 11.5e6


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_hashable_and_equal_configs_are_one_static_argument(name):
    config = PRESETS[name]
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"qk_rope_dim": 15}, "come in pairs"),
        ({"index_dim": 8}, "below qk_rope_dim"),
        ({"num_layers": 9}, "8 entries for 9 layers"),
        ({"indexer_types": ("shared",) * 8}, "nothing to share"),
        ({"num_dense_layers": 9}, "exceeds num_layers"),
        ({"num_expert_groups": 3}, "do not split into 3 groups"),
        ({"num_expert_groups": 8, "kept_expert_groups": 1}, "exceeds the 1 experts"),
        ({"param_dtype": "int8"}, "int8"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        dataclasses.replace(TINY, **changes)
    assert "\n" not in str(raised.value)


def test_values_from_outside_make_the_same_configuration():
    values = json.loads(json.dumps(dataclasses.asdict(GLM_5_3)))
    assert config_from_values(values) == GLM_5_3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "256"}, "hidden_size is '256'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"indexer_types": ["full"] * 7 + ["none"]}, "'none'"),
        ({"indexer_types": "full"}, "indexer_types is 'full'"),
        ({"index_rope_style": "spiral"}, "spiral"),
        ({"eos_ids": ["x"]}, "eos_ids"),
        ({"depth": 3}, "unknown entries: depth"),
    ],
)
def test_values_of_the_wrong_type_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        config_from_values(dataclasses.asdict(TINY) | changes)


def test_missing_values_are_named():
    with pytest.raises(UserError, match="lacks 1 entries: context"):
        values = dataclasses.asdict(TINY)
        del values["context"]
        config_from_values(values)
