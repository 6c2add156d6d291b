"""Reading the `config.json` of a published GLM-5.x checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhisparse_jax.configs.glm import GlmConfig, config_from_values, derive_indexer_types
from dhisparse_jax.errors import UserError

MODEL_TYPE = "glm_moe_dsa"

# Our name: the published name.
_SIZES = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "dense_intermediate_size": "intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate_size": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_top_k": "index_topk",
}

# Settings that change the arithmetic, with the only value that the model implements.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "rope_scaling": None,
    "quantization_config": None,
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: The file is missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def parse_config(raw: Mapping[str, Any]) -> GlmConfig:
    """The sizes in a published configuration.

    `head_dim` is ignored: published files hold the rope or the nope width there.

    Raises:
        UserError: Another model type, a missing or wrongly typed entry, or a setting that changes
            the arithmetic and is not implemented.
    """
    if raw.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"model_type is {raw.get('model_type')!r}; only {MODEL_TYPE!r} is supported"
        )
    for name, value in _FIXED.items():
        if raw.get(name, value) != value:
            raise UserError(f"{name} is {raw[name]!r}; only {value!r} is supported")
    missing = sorted(name for name in _SIZES.values() if name not in raw)
    if missing:
        raise UserError(f"the configuration lacks {len(missing)} entries: {', '.join(missing)}")
    sizes = {ours: integer(raw, published) for ours, published in _SIZES.items()}
    return config_from_values(
        {
            **sizes,
            "num_dense_layers": _num_dense_layers(raw, sizes["num_layers"]),
            "num_expert_groups": integer(raw, "n_group", 1),
            "kept_expert_groups": integer(raw, "topk_group", 1),
            "normalise_routing": bool(raw.get("norm_topk_prob", True)),
            "routed_scale": number(raw, "routed_scaling_factor", 2.5),
            "indexer_types": _indexer_types(raw, sizes["num_layers"]),
            "index_rope_style": (
                "interleaved" if raw.get("indexer_rope_interleave", True) else "half-split"
            ),
            "rope_theta": rope_theta(raw),
            "norm_eps": number(raw, "rms_norm_eps", 1e-5),
            "bos_id": raw.get("bos_token_id"),
            "eos_ids": _eos_ids(raw),
            "param_dtype": raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        }
    )


def integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An entry that must be a whole number."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} is {value!r}, expected a whole number")
    return value


def number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """An entry that must be a number."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} is {value!r}, expected a number")
    return float(value)


def _eos_ids(raw: Mapping[str, Any]) -> list[int]:
    """Ids that end a text: published as none, one, or a list."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"eos_token_id is {value!r}, expected whole numbers")
    return ids


def rope_theta(raw: Mapping[str, Any]) -> float:
    """Rope base, from either place that published files keep it."""
    rope = raw.get("rope_parameters") or raw
    if not isinstance(rope, Mapping):
        raise UserError(f"rope_parameters is {rope!r}, expected an object")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise UserError(f"rope_type is {kind!r}; only 'default' is supported")
    return number(rope, "rope_theta")


def _indexer_types(raw: Mapping[str, Any], num_layers: int) -> object:
    """The listed types, or the rule of `derive_indexer_types` with its published defaults."""
    if raw.get("indexer_types") is not None:
        return raw["indexer_types"]
    pattern = raw.get("index_topk_pattern")
    if not isinstance(pattern, str | None):
        raise UserError(f"index_topk_pattern is {pattern!r}, expected a string of F and S")
    return derive_indexer_types(
        num_layers,
        freq=integer(raw, "index_topk_freq", 1),
        offset=integer(raw, "index_skip_topk_offset", 2),
        pattern=pattern,
    )


def _num_dense_layers(raw: Mapping[str, Any], num_layers: int) -> int:
    """Leading dense layers; the published list of types wins over the count."""
    types = raw.get("mlp_layer_types")
    if types is None:
        return integer(raw, "first_k_dense_replace")
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise UserError("mlp_layer_types is not a run of 'dense' followed by 'sparse' layers")
    return dense
