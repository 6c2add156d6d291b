"""Reading the `config.json` of a published DeepSeek-V4.1 checkpoint: its text part."""

from collections.abc import Mapping
from typing import Any

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.values import config_of
from dhisparse_jax.errors import UserError, renamed
from dhisparse_jax.models.deepseek_v4.hf_config import DRAFTER, FIXED, NAMES, REPEATED, SIZES
from dhisparse_jax.models.entries import (
    integer,
    number,
    read_sizes,
    refuse_other,
    refuse_unknown,
)
from dhisparse_jax.models.hf_config import eos_ids, rope_theta, yarn

TEXT = "text_config"

# Our name: the published name.
_ENGRAM = {
    "engram_order": "engram_max_ngram_size",
    "engram_heads": "engram_n_heads",
    "engram_dim": "engram_head_dim",
    "engram_buckets": "engram_vocab_size",
    "engram_vocab": "engram_compressed_vocab_size",
}
_CANDIDATES = {
    "candidate_blocks": "candidate_topk_blocks",
    "candidate_block": "candidate_block_size",
}
_LISTS = {
    "entry_sources": "kv_source_layer_ids",
    "index_sources": "index_source_layer_ids",
    "engram_layers": "engram_layer_ids",
    "engram_rows": "engram_num_embeddings",
}
_PAD = ("engram_pad_token_id", "engram_pad_id")
"""Two names of one entry: of the configuration, and of DeepSeek's own implementation."""
_CANDIDATE_SOURCE = "candidate_source_layer_id"
_NAMES = {
    **NAMES,
    **_ENGRAM,
    **_CANDIDATES,
    **_LISTS,
    "rates": "compress_ratios",
    "candidate_source": _CANDIDATE_SOURCE,
}
_TEMPERATURE = {"gate_temp": 1.0}

# Entries that this module reads, beside those above.
_READ = {
    "model_type", "num_hidden_layers", "compress_ratios", "routed_scaling_factor", "swiglu_limit",
    "qk_rope_head_dim", "rope_theta", "compress_rope_theta", "rope_scaling", "rope_parameters",
    "hc_eps", "rms_norm_eps", "bos_token_id", "eos_token_id", "dtype", "torch_dtype",
    "quantization_config", _CANDIDATE_SOURCE, *_PAD,
}  # fmt: skip

# Of the parts of the model that are not the text path, which are not used.
_OTHER_PARTS = {"vision_config", "image_token_id", "processor_config"}


@renamed(_NAMES)
def parse_v41_config(raw: Mapping[str, Any]) -> V41Config:
    """The sizes in a published configuration, whose text part may be an object of its own.

    Raises:
        UserError: A missing or wrongly typed entry, or a setting that changes the arithmetic, or
            may do so, and is not implemented.
    """
    raw = flat_config(raw)
    fixed = {**FIXED, **_TEMPERATURE}
    refuse_other(raw, fixed)
    named = {**SIZES, **_ENGRAM, **_CANDIDATES, **_LISTS}
    known = _READ | REPEATED | _OTHER_PARTS | fixed.keys() | set(named.values())
    refuse_unknown(raw, known | {name for name in raw if name.startswith(DRAFTER)})
    theta = number(raw, "compress_rope_theta", 1.6e5)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"the rope parameters are {rope!r}, expected an object")
    stretched = {"rope_parameters": {"attention_factor": 1.0, **rope, "rope_theta": theta}}
    return config_of(
        V41Config,
        {
            **read_sizes(raw, SIZES),
            **_engram(raw),
            **_sources(raw),
            "rope_dim": integer(raw, "qk_rope_head_dim"),
            "rates": _rates(raw),
            "routed_scale": number(raw, "routed_scaling_factor", 1.5),
            "swiglu_limit": number(raw, "swiglu_limit", 10.0),
            "rope_theta": number(raw, "rope_theta", 1e4),
            "compress_theta": rope_theta(stretched, ("default", "yarn")),
            "yarn": yarn(stretched),
            "hc_eps": number(raw, "hc_eps", 1e-6),
            "norm_eps": number(raw, "rms_norm_eps", 1e-20),
            "bos_id": raw.get("bos_token_id"),
            "eos_ids": eos_ids(raw),
            "param_dtype": raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        },
    )


def flat_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the text part beside those of the whole, which are not its type.

    Raises:
        UserError: There is a text part, which is no object.
    """
    text = raw.get(TEXT, {})
    if not isinstance(text, Mapping):
        raise UserError(f"{TEXT} is {text!r}, expected an object")
    return {name: value for name, value in {**raw, **text}.items() if name != TEXT}


def _rates(raw: Mapping[str, Any]) -> list[int]:
    """Positions per entry of every layer; those of the drafter's layers follow."""
    layers, rates = integer(raw, "num_hidden_layers"), raw.get("compress_ratios")
    if not isinstance(rates, list) or len(rates) < layers:
        raise UserError(f"compress_ratios is no list of {layers} layers")
    if not all(type(rate) is int and rate >= 0 for rate in rates):
        raise UserError(f"compress_ratios is {rates!r}, expected whole numbers")
    return rates[:layers]


def _sources(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers make entries and select, and which one leaves candidates to the others."""
    found: dict[str, Any] = {
        ours: _list(raw, _LISTS[ours]) for ours in ("entry_sources", "index_sources")
    }
    source = raw.get(_CANDIDATE_SOURCE)
    if source is None or source == -1:
        return found
    return found | {"candidate_source": source, **read_sizes(raw, _CANDIDATES)}


def _engram(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of n-grams, if there are any."""
    layers = _list(raw, _LISTS["engram_layers"], [])
    if not layers:
        return {}
    pad = next((name for name in _PAD if name in raw), _PAD[0])
    return {
        **read_sizes(raw, _ENGRAM),
        "engram_layers": layers,
        "engram_rows": _list(raw, _LISTS["engram_rows"]),
        "engram_pad_id": integer(raw, pad),
    }


def _list(raw: Mapping[str, Any], name: str, default: list[int] | None = None) -> list[int]:
    """An entry that must be a list of whole numbers."""
    value = raw.get(name, default)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise UserError(f"{name} is {value!r}, expected a list of whole numbers")
    return value
