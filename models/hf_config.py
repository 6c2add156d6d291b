"""Reading the `config.json` of a published GLM-5.x or DeepSeek-V3.2 checkpoint."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dhisparse_jax.configs.glm import GlmConfig, config_from_values, derive_indexer_types
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.errors import UserError, renamed
from dhisparse_jax.models.entries import (
    MTP_LAYERS,
    flag,
    integer,
    number,
    read_sizes,
    refuse_other,
    refuse_unknown,
)

GLM, DEEPSEEK = "glm_moe_dsa", "deepseek_v32"
MODEL_TYPES = (GLM, DEEPSEEK)

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
}

# The same of rotary embeddings, and the entries that are read there.
_FIXED_ROPE = {"partial_rotary_factor": 1.0}
_ROPE = _FIXED_ROPE.keys() | {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
}  # fmt: skip

# Entries that this module reads, beside those above.
_READ = {
    "model_type", "first_k_dense_replace", "mlp_layer_types", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor", "indexer_types", "index_topk_pattern",
    "index_topk_freq", "index_skip_topk_offset", "indexer_rope_interleave", "rope_theta",
    "rope_parameters", "rope_scaling", "rms_norm_eps", "bos_token_id", "eos_token_id", "dtype",
    "torch_dtype", "quantization_config", "layer_types", "scale_fmt",
}  # fmt: skip

# Entries without an effect on the arithmetic of inference, or that only repeat others: of any
# model, and of this one.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha",
    "chunk_size_feed_forward", "ep_size", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "num_local_experts", MTP_LAYERS, "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "router_aux_loss_coef", "seq_aux",
    "transformers_version", "use_cache",
}  # fmt: skip
_WITHOUT_EFFECT = WITHOUT_EFFECT | {
    "head_dim", "index_share_for_mtp_iteration", "moe_layer_freq", "num_experts",
    "num_key_value_heads", "qk_head_dim",
}  # fmt: skip
_LAYER_TYPE = "indexed_attention"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: The file is missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


@renamed(_SIZES)
def parse_config(raw: Mapping[str, Any]) -> GlmConfig:
    """The sizes in a published configuration.

    `head_dim` is ignored: published files hold the rope or the nope width there.

    Raises:
        UserError: Another model type, a missing or wrongly typed entry, or a setting that changes
            the arithmetic, or may do so, and is not implemented.
    """
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        known = " and ".join(repr(known) for known in MODEL_TYPES)
        raise UserError(f"model_type is {kind!r}; only {known} are supported")
    refuse_other(raw, _FIXED)
    _check_known(raw)
    if (rope := _rope(raw)) is not raw:
        refuse_other(rope, _FIXED_ROPE)
        refuse_unknown(rope, _ROPE)
    sizes = read_sizes(raw, _SIZES)
    return config_from_values(
        {
            **sizes,
            "num_dense_layers": _num_dense_layers(raw, sizes["num_layers"]),
            "num_expert_groups": integer(raw, "n_group", 1),
            "kept_expert_groups": integer(raw, "topk_group", 1),
            "normalise_routing": flag(raw, "norm_topk_prob", True),
            "routed_scale": number(raw, "routed_scaling_factor", 2.5),
            "indexer_types": _indexer_types(raw, sizes["num_layers"]),
            "index_rope_style": _index_rope_style(raw),
            "rope_theta": rope_theta(
                raw, ("default", "yarn") if kind == DEEPSEEK else ("default",)
            ),
            "yarn": yarn(raw) if kind == DEEPSEEK else None,
            "norm_eps": number(raw, "rms_norm_eps", 1e-6 if kind == DEEPSEEK else 1e-5),
            "bos_id": raw.get("bos_token_id"),
            "eos_ids": eos_ids(raw),
            "param_dtype": raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
            "power_scales": _scale_format(raw) == "ue8m0",
        }
    )


def eos_ids(raw: Mapping[str, Any]) -> list[int]:
    """Ids that end a text: published as none, one, or a list."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"eos_token_id is {value!r}, expected whole numbers")
    return ids


def rope_theta(raw: Mapping[str, Any], kinds: Collection[str] = ("default",)) -> float:
    """Rope base, from either place that published files keep it.

    Args:
        raw: the configuration.
        kinds: of rotary embedding that the caller implements.
    """
    rope = _rope(raw)
    if _rope_kind(rope) not in kinds:
        known = " and ".join(repr(kind) for kind in kinds)
        raise UserError(f"rope_type is {_rope_kind(rope)!r}; only {known} is supported")
    return number(rope if "rope_theta" in rope else raw, "rope_theta")


def yarn(raw: Mapping[str, Any]) -> Yarn | None:
    """How positions are stretched, if they are.

    `mscale` is for the rotated channels and `mscale_all_dim` for the whole head: the latter goes
    into the logits, and the channels keep the ratio of the two (DeepSeek-V3's implementation).
    """
    rope = _rope(raw)
    if _rope_kind(rope) != "yarn":
        return None
    refuse_unknown(rope, _ROPE)
    factor = number(rope, "factor")
    growth = lambda scale: 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
    part, whole = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    usual = growth(part) / growth(whole) if part and whole else growth(1.0)
    return Yarn(
        factor=factor,
        context=integer(rope, "original_max_position_embeddings"),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        amplitude=number(rope, "attention_factor", usual),
        logit_factor=growth(whole) ** 2 if whole else 1.0,
    )


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the parameters of the rotary embedding; the whole if there is none."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if rope:
            if not isinstance(rope, Mapping):
                raise UserError(f"{name} is {rope!r}, expected an object")
            return rope
    return raw


def _rope_kind(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type") or rope.get("type") or "default"


def _check_known(raw: Mapping[str, Any]) -> None:
    """Raises UserError where an entry is set whose meaning is not known here."""
    types = raw.get("layer_types") or []
    if not isinstance(types, list) or types.count(_LAYER_TYPE) < len(types):
        raise UserError(f"layer_types holds more than {_LAYER_TYPE!r}, which is not supported")
    refuse_unknown(raw, _READ | _WITHOUT_EFFECT | _FIXED.keys() | set(_SIZES.values()))


def _scale_format(raw: Mapping[str, Any]) -> object:
    """What scales of fp8 activations are: "ue8m0" for powers of two, which DeepSeek's are."""
    quantisation = raw.get("quantization_config")
    inner = quantisation.get("scale_fmt") if isinstance(quantisation, Mapping) else None
    given = raw.get("scale_fmt") or inner
    return given or ("ue8m0" if raw["model_type"] == DEEPSEEK else None)


def _index_rope_style(raw: Mapping[str, Any]) -> str:
    """DeepSeek's index heads are half-split; GLM's interleaved, unless the configuration says."""
    interleaved = flag(raw, "indexer_rope_interleave", raw["model_type"] == GLM)
    return "interleaved" if interleaved else "half-split"


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
