"""Reading the `config.json` of a published DeepSeek-V4 checkpoint, of DeepSeek or transformers."""

from collections.abc import Mapping
from typing import Any

from dhisparse_jax.configs.deepseek_v4 import ALL, SELECTED, WINDOW, V4Config
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.configs.values import config_of
from dhisparse_jax.errors import UserError, renamed
from dhisparse_jax.models.entries import (
    integer,
    number,
    read_sizes,
    refuse_other,
    refuse_unknown,
)
from dhisparse_jax.models.hf_config import WITHOUT_EFFECT, eos_ids, rope_theta, yarn

# Our name: the published name; of all models since DeepSeek-V4.
SIZES = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "output_groups": "o_groups",
    "output_lora_rank": "o_lora_rank",
    "window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_top_k": "index_topk",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate_size": "moe_intermediate_size",
    "streams": "hc_mult",
    "sinkhorn_steps": "hc_sinkhorn_iters",
}

NAMES = {
    **SIZES,
    "rope_dim": "qk_rope_head_dim",
    "routed_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
}
"""The published names of what has another name here, for errors."""

# Settings that change the arithmetic, with the only value that is implemented.
FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}

# Entries that this module reads, beside those above.
_READ = {
    "model_type", "num_hidden_layers", "layer_types", "compress_ratios", "compress_rates",
    "compress_rate_csa", "compress_rate_hca", "num_hash_layers", "mlp_layer_types",
    "routed_scaling_factor", "swiglu_limit", "qk_rope_head_dim", "partial_rotary_factor",
    "rope_theta", "compress_rope_theta", "rope_parameters", "rope_scaling", "hc_eps",
    "rms_norm_eps", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config",
}  # fmt: skip

# Entries without an effect here, or that only repeat others; the drafter in the checkpoint has its
# own, with names that begin as these do.
REPEATED = WITHOUT_EFFECT | {
    "expert_dtype", "intermediate_size", "router_jitter_noise", "scale_fmt",
}  # fmt: skip
DRAFTER = "dspark_"

_KINDS = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": SELECTED,
    "heavily_compressed_attention": ALL,
}
_USUAL_RATES = (4, 128)


@renamed(NAMES)
def parse_v4_config(raw: Mapping[str, Any]) -> V4Config:
    """The sizes in a published configuration.

    Raises:
        UserError: A missing or wrongly typed entry, or a setting that changes the arithmetic, or
            may do so, and is not implemented.
    """
    refuse_other(raw, FIXED)
    known = _READ | REPEATED | FIXED.keys() | set(SIZES.values())
    refuse_unknown(raw, known | {name for name in raw if name.startswith(DRAFTER)})
    sizes, layers = read_sizes(raw, SIZES), integer(raw, "num_hidden_layers")
    selected_rate, all_rate = _rates(raw)
    main, compress = _ropes(raw)
    return config_of(
        V4Config,
        {
            **sizes,
            "rope_dim": _rope_dim(raw, sizes["head_dim"], (main, compress)),
            "layer_kinds": _layer_kinds(raw, layers, {selected_rate: SELECTED, all_rate: ALL}),
            "selected_rate": selected_rate,
            "all_rate": all_rate,
            "num_hash_layers": _num_hash_layers(raw, layers),
            "routed_scale": number(raw, "routed_scaling_factor", 1.5),
            "swiglu_limit": number(raw, "swiglu_limit", 10.0),
            "rope_theta": rope_theta(main),
            "compress_theta": rope_theta(compress, ("default", "yarn")),
            "yarn": _stretching(compress),
            "hc_eps": number(raw, "hc_eps", 1e-6),
            "norm_eps": number(raw, "rms_norm_eps", 1e-6),
            "bos_id": raw.get("bos_token_id"),
            "eos_ids": eos_ids(raw),
            "param_dtype": raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        },
    )


def _rates(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Positions per entry of the two kinds of layers that have entries.

    Where only rates of layers are published, and two, entries of the smaller one are selected.
    """
    rates = raw.get("compress_rates") or {}
    if not isinstance(rates, Mapping) or rates.keys() - _KINDS.keys():
        raise UserError(f"compress_rates is {rates!r}, expected rates by type of layer")
    ratios = raw.get("compress_ratios")
    listed = ratios if isinstance(ratios, list) else []
    several = sorted({rate for rate in listed if type(rate) is int and rate > 0})
    usual = several if len(several) == 2 else _USUAL_RATES
    selected = integer(rates, "compressed_sparse_attention", usual[0])
    every = integer(rates, "heavily_compressed_attention", usual[1])
    found = (
        integer(raw, "compress_rate_csa", selected),
        integer(raw, "compress_rate_hca", every),
    )
    if found[0] == found[1]:
        raise UserError(f"both kinds of compressed layers have a rate of {found[0]}")
    return found


def _layer_kinds(raw: Mapping[str, Any], layers: int, by_rate: Mapping[int, str]) -> list[str]:
    """Kinds by layer: from the types, or from the rates (0: a window alone; MTP layers follow)."""
    types, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    if types is None and ratios is None:
        raise UserError("the configuration lacks layer_types, or compress_ratios in its place")
    kinds = []
    for name, values, known in (
        ("layer_types", types, _KINDS),
        ("compress_ratios", ratios, {0: WINDOW, **by_rate}),
    ):
        if values is None:
            continue
        if not isinstance(values, list) or len(values) < layers:
            raise UserError(f"{name} is no list of {layers} layers")
        unknown = [value for value in values[:layers] if value not in list(known)]
        if unknown:
            raise UserError(f"{name} holds {unknown[0]!r}; known are {', '.join(map(str, known))}")
        kinds.append([known[value] for value in values[:layers]])
    if kinds[0] != kinds[-1]:
        raise UserError("layer_types and compress_ratios contradict each other")
    return kinds[0]


def _num_hash_layers(raw: Mapping[str, Any], layers: int) -> int:
    """Leading layers that choose experts by token; the list of types wins over the count."""
    types = raw.get("mlp_layer_types")
    if types is None:
        return min(integer(raw, "num_hash_layers", 3), layers)
    hashed = types.count("hash_moe") if isinstance(types, list) else 0
    if types != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
        raise UserError("mlp_layer_types is not a run of 'hash_moe' followed by 'moe' layers")
    return hashed


def _ropes(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary parameters of layers with a window alone, and of those with entries.

    transformers keeps two objects; DeepSeek one, which stretches the latter.
    """
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise UserError(f"the rope parameters are {given!r}, expected an object")
    nothing: dict[str, Any] = {}
    main, compress = given.get("main", nothing), given.get("compress", given)
    both = all(isinstance(rope, Mapping) for rope in (main, compress))
    if not both or ("main" in given) != ("compress" in given):
        raise UserError("rope_parameters has not both of 'main' and 'compress'")
    theta = number(raw, "compress_rope_theta", 1.6e5)
    plain = {"rope_theta": number(raw, "rope_theta", 1e4)}
    return {**plain, **main}, {**compress, "rope_theta": compress.get("rope_theta", theta)}


def _stretching(compress: Mapping[str, Any]) -> Yarn | None:
    """The rotated channels are not amplified, whatever the factor."""
    own = {name: value for name, value in compress.items() if name != "partial_rotary_factor"}
    return yarn({"rope_parameters": {"attention_factor": 1.0, **own}})


def _rope_dim(raw: Mapping[str, Any], head: int, ropes: tuple[Mapping[str, Any], ...]) -> int:
    """Rotated channels: published as a number, or as a part of the head, in several places."""
    parts = [
        *(rope.get("partial_rotary_factor") for rope in ropes),
        raw.get("partial_rotary_factor"),
    ]
    found = {
        int(head * number({"partial_rotary_factor": part}, "partial_rotary_factor"))
        for part in parts
        if part is not None
    }
    if raw.get("qk_rope_head_dim") is not None:
        found.add(integer(raw, "qk_rope_head_dim"))
    if len(found) != 1:
        told = " and ".join(map(str, sorted(found))) or "none"
        raise UserError(f"the number of rotated channels is not clear: {told}")
    return found.pop()
