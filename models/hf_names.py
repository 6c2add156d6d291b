"""Names of tensors: DeepSeek's own, in terms of those that transformers uses."""

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
_MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def canonical_name(name: str) -> str:
    """The name that transformers gives a tensor of the DeepSeek-V3 family.

    In: `layers.3.ffn.experts.7.w1.scale`.
    Out: `model.layers.3.mlp.experts.7.gate_proj.weight_scale_inv`.
    Names that are transformers' already, and unknown ones, stay as they are.
    """
    top, _, rest = name.partition(".")
    if top in _TOP:
        return f"{_TOP[top]}.{rest}"
    if top != "layers":
        return name
    layer, _, rest = rest.partition(".")
    part, _, rest = rest.partition(".")
    if part in _LAYER:
        return f"model.layers.{layer}.{_LAYER[part]}.{rest}"
    if part == "attn":
        module, _, kind = rest.partition(".")
        path = f"self_attn.{_ATTENTION.get(module, module)}.{kind}"
    elif part == "ffn":
        path = _feed_forward(rest)
    else:
        path = f"{part}.{rest}"
    stem, _, kind = path.rpartition(".")
    return f"model.layers.{layer}.{stem}.{'weight_scale_inv' if kind == 'scale' else kind}"


def _feed_forward(rest: str) -> str:
    """In: `experts.7.w1.weight`, or `gate.bias`, which corrects the choice of experts."""
    if rest == "gate.bias":
        return "mlp.gate.e_score_correction_bias"
    return ".".join(["mlp", *(_MLP.get(part, part) for part in rest.split("."))])
