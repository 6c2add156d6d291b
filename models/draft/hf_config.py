"""Reading the `config.json` of a published draft: DFlash, DFlash2, DSpark, and speculators' form.

Entries stand at the top, in `dflash_config`, or, in speculators' form, in
`transformer_layer_config`; every entry is looked for in all of them.
"""

from collections.abc import Mapping
from typing import Any, cast

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.config import (
    DraftConfig,
    Kind,
    MarkovConfig,
    MarkovKind,
    SelectorConfig,
)
from dhisparse_jax.models.entries import integer, number
from dhisparse_jax.models.hf_config import rope_theta

_ARCHITECTURES: dict[str, Kind] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
}
_PARTS = ("dflash_config", "transformer_layer_config")

# Settings that change the arithmetic, with the only value that the draft implements.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "attention_sink_bias": None,
    "attention_value_scale": None,
    "quantization_config": None,
    "draft_adapter_rank": 0,
}
_MARKOV_KINDS = ("vanilla", "gated", "rnn")

Raw = Mapping[str, Any]


def parse_draft_config(raw: Raw, target: GlmConfig) -> DraftConfig:
    """The sizes in a published configuration.

    Args:
        raw: the JSON object.
        target: sizes of the target, for what speculators' form leaves out.

    Raises:
        UserError: Another architecture, an entry that is missing, wrongly typed, or stands in two
            places with different values, or a setting that is not implemented.
    """
    kind, speculators = _kind(raw), "speculators_model_type" in raw
    flat = _flatten(raw)
    for name, value in _FIXED.items():
        if flat.get(name) not in (value, None):
            raise UserError(f"the draft's {name} is {flat[name]!r}; only {value!r} is supported")
    vocabulary = integer(flat, "vocab_size")
    if flat.get("draft_vocab_size") not in (vocabulary, None):
        raise UserError(
            f"the draft has a vocabulary of {flat['draft_vocab_size']} of the target's "
            f"{vocabulary} tokens; only drafts with all of them are supported"
        )
    if flat.get("mask_token_id") is None:
        raise UserError("the draft's configuration has no mask_token_id; add the target's id")
    layers, heads = integer(flat, "num_hidden_layers"), integer(flat, "num_attention_heads")
    width = integer(flat, "hidden_size")
    target_layers = integer(flat, "num_target_layers", target.num_layers)
    windows = _windows(flat, layers)
    block = integer(flat, "block_size")
    return DraftConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=integer(flat, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(flat, "num_key_value_heads", heads),
        head_dim=integer(flat, "head_dim", width // heads),
        target_hidden_size=integer(flat, "target_hidden_size", width),
        target_layers=target_layers,
        taps=_taps(flat, layers, target_layers),
        mask_token_id=integer(flat, "mask_token_id"),
        block_size=block,
        anchor_first=_anchor_first(flat, kind, block, speculators=speculators),
        windows=windows,
        causal=_causal(flat, kind, windows),
        rope_theta=rope_theta(flat),
        norm_eps=number(flat, "rms_norm_eps", 1e-6),
        input_scale=_scale(flat),
        output_multiplier=number(flat, "output_multiplier", 1.0),
        logit_softcap=_optional(flat, "final_logit_softcapping"),
        selector=_selector(flat) if kind == "dflash2" else None,
        markov=_markov(flat) if kind == "dspark" else None,
        param_dtype=str(flat.get("dtype") or flat.get("torch_dtype") or "bfloat16"),
    )


def default_taps(layers: int, target_layers: int) -> tuple[int, ...]:
    """Layers that a draft of `layers` layers taps where it does not say: 1 to L - 3, evenly."""
    if layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + number * step) for number in range(layers))


def _kind(raw: Raw) -> Kind:
    """Which draft it is, by its architecture or by speculators' type."""
    if "speculators_model_type" in raw:
        name = raw["speculators_model_type"]
        kinds: dict[str, Kind] = {str(kind): kind for kind in _ARCHITECTURES.values()}
    else:
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        kinds = _ARCHITECTURES
    if not isinstance(name, str) or name not in kinds:
        raise UserError(f"the draft's architecture is {name!r}; supported are {', '.join(kinds)}")
    return kinds[name]


def _flatten(raw: Raw) -> Raw:
    """All entries at one level; a null says nothing."""
    flat = {name: value for name, value in raw.items() if value is not None}
    for part in _PARTS:
        entries = flat.pop(part, {})
        if not isinstance(entries, Mapping):
            raise UserError(f"{part} is {entries!r}, expected an object")
        for name, value in entries.items():
            if value is None:
                continue
            if name not in ("architectures", "model_type") and flat.get(name, value) != value:
                raise UserError(f"{name} is {flat[name]!r}, but {value!r} in {part}")
            flat.setdefault(name, value)
    return flat


def _taps(flat: Raw, layers: int, target_layers: int) -> tuple[int, ...]:
    """The tapped layers; speculators counts hidden states, of which layer L gives number L + 1."""
    if "target_layer_ids" in flat:
        return tuple(_integers(flat, "target_layer_ids"))
    if "aux_hidden_state_layer_ids" in flat:
        return tuple(number - 1 for number in _integers(flat, "aux_hidden_state_layer_ids"))
    return default_taps(layers, target_layers)


def _integers(flat: Raw, name: str) -> list[int]:
    values = flat[name]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UserError(f"{name} is {values!r}, expected a list of whole numbers")
    return values


def _anchor_first(flat: Raw, kind: Kind, block: int, *, speculators: bool) -> bool:
    """Whether the anchor's row proposes. The wrong layout runs too, and is never accepted.

    Raises:
        UserError: A DSpark in speculators' form that says neither this nor how much it proposes.
    """
    given = flat.get("sample_from_anchor")
    if given is not None:
        return _flag(flat, "sample_from_anchor")
    if kind != "dspark" or not speculators:
        return kind == "dspark"
    methods = (flat.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposals = methods[0].get("speculative_tokens")
    if proposals not in (block, block - 1):
        raise UserError(
            f"a DSpark in speculators' form with block_size {block} must say sample_from_anchor, "
            "or speculative_tokens equal to it or one less"
        )
    return proposals == block


def _windows(flat: Raw, layers: int) -> tuple[int | None, ...]:
    """The trained window of every layer: by `layer_types`, or one for all."""
    types = flat.get("layer_types")
    if flat.get("use_swa"):
        return (integer(flat, "swa_window_size"),) * layers
    if types is None:
        sliding = bool(flat.get("use_sliding_window", False))
        types = ["sliding_attention" if sliding else "full_attention"] * layers
    if not isinstance(types, list) or not set(types) <= {"sliding_attention", "full_attention"}:
        raise UserError(
            f"layer_types is {types!r}, expected a list of sliding_attention and full_attention"
        )
    return tuple(
        integer(flat, "sliding_window") if kind == "sliding_attention" else None for kind in types
    )


def _causal(flat: Raw, kind: Kind, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """In-block masks: what is said, or the older rule that sliding layers of a DFlash have one."""
    for name in ("is_causal", "causal"):
        if name in flat:
            return (_flag(flat, name),) * len(windows)
    if "sliding_window_non_causal" in flat:
        causal = not _flag(flat, "sliding_window_non_causal")
        return tuple(causal and window is not None for window in windows)
    return tuple(window is not None and kind != "dspark" for window in windows)


def _flag(flat: Raw, name: str) -> bool:
    value = flat[name]
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}, expected true or false")
    return value


def _scale(flat: Raw) -> float:
    """Factor on the embeddings, under either of its names."""
    return number(flat, "input_embedding_scale", number(flat, "noise_embed_scale", 1.0))


def _optional(flat: Raw, name: str) -> float | None:
    return number(flat, name) if name in flat else None


def _selector(flat: Raw) -> SelectorConfig:
    return SelectorConfig(
        rank=integer(flat, "selector_rank", 256),
        top_k=integer(flat, "selector_top_k", 16),
        conv_taps=integer(flat, "conv_kernel_size", 2),
        conv_group=integer(flat, "conv_group_size", 16),
    )


def _markov(flat: Raw) -> MarkovConfig | None:
    """DSpark's heads; rank 0 is the published way to have none."""
    rank, kind = integer(flat, "markov_rank", 256), flat.get("markov_head_type", "vanilla")
    confidence = bool(flat.get("enable_confidence_head", True))
    if kind not in _MARKOV_KINDS:
        raise UserError(f"markov_head_type is {kind!r}; use one of {', '.join(_MARKOV_KINDS)}")
    if rank == 0:
        if confidence:
            raise UserError("markov_rank is 0, but the draft has a confidence head, which needs it")
        return None
    return MarkovConfig(
        rank=rank,
        kind=cast(MarkovKind, kind),
        confidence=confidence,
        confidence_with_markov=bool(flat.get("confidence_head_with_markov", True)),
    )
