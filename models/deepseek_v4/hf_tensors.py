"""Published tensors of DeepSeek-V4: names, shapes, and where they go in our weights.

Knows nothing about files. A tensor has DeepSeek's own name here; published matrices are
`[out, in]`, ours `[in, out]`, except for experts that stay quantised.
"""

from collections.abc import Mapping

from dhisparse_jax.configs.deepseek_v4 import SELECTED, V4Config, V4Sizes
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.models.params import Flat
from dhisparse_jax.models.pieces import stacked_experts, stored_experts, whole_tensor
from dhisparse_jax.models.stream import Piece, Pieces
from dhisparse_jax.models.tensor_files import Shape

# Our name: the published one; first those that all models since DeepSeek-V4 have.
TOP = {
    "embedding": "embed.weight",
    "norm.weight": "norm.weight",
    "head.kernel": "head.weight",
}
HYPER_HEAD = {
    "hyper_head.fn": "hc_head_fn",
    "hyper_head.base": "hc_head_base",
    "hyper_head.scale": "hc_head_scale",
}
_TOP = TOP | HYPER_HEAD
IN_LAYER = {
    "attention_norm.weight": "attn_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "attention_hyper.fn": "hc_attn_fn",
    "attention_hyper.base": "hc_attn_base",
    "attention_hyper.scale": "hc_attn_scale",
    "mlp_hyper.fn": "hc_ffn_fn",
    "mlp_hyper.base": "hc_ffn_base",
    "mlp_hyper.scale": "hc_ffn_scale",
    "attention.q_a.kernel": "attn.wq_a.weight",
    "attention.q_norm.weight": "attn.q_norm.weight",
    "attention.q_b.kernel": "attn.wq_b.weight",
    "attention.kv.kernel": "attn.wkv.weight",
    "attention.kv_norm.weight": "attn.kv_norm.weight",
    "attention.sinks": "attn.attn_sink",
    "attention.out_b.kernel": "attn.wo_b.weight",
    "attention.indexer.wq.kernel": "attn.indexer.wq_b.weight",
    "attention.indexer.head_weights": "attn.indexer.weights_proj.weight",
    "mlp.router.kernel": "ffn.gate.weight",
    "mlp.router.bias": "ffn.gate.bias",
    "mlp.shared.gate.kernel": "ffn.shared_experts.w1.weight",
    "mlp.shared.up.kernel": "ffn.shared_experts.w3.weight",
    "mlp.shared.down.kernel": "ffn.shared_experts.w2.weight",
}
_IN_LAYER = IN_LAYER | {
    "attention.compressor.wkv": "attn.compressor.wkv.weight",
    "attention.compressor.wgate": "attn.compressor.wgate.weight",
    "attention.compressor.ape": "attn.compressor.ape",
    "attention.compressor.norm.weight": "attn.compressor.norm.weight",
    "attention.indexer.compressor.wkv": "attn.indexer.compressor.wkv.weight",
    "attention.indexer.compressor.wgate": "attn.indexer.compressor.wgate.weight",
    "attention.indexer.compressor.ape": "attn.indexer.compressor.ape",
    "attention.indexer.compressor.norm.weight": "attn.indexer.compressor.norm.weight",
    "mlp.router.by_token": "ffn.gate.tid2eid",
}
EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_BY_TOKEN, _BIAS = "ffn.gate.tid2eid", "ffn.gate.bias"
_AS_PUBLISHED = ("ape", "by_token", "q_weight", "k_weight", "table.weight", "markov_w1.weight")
"""Ends of our names of tables, which are no matrices to be turned."""

# What transformers writes differently: the beginning or the end of a name, and DeepSeek's.
_STARTS = {"embed_tokens.": "embed.", "hc_head.": "", "lm_head.": "head."}
_ENDS = {
    ".attn.norm.weight": ".attn.kv_norm.weight",
    ".scale": ".weight_scale_inv",  # what scales are called here, whatever the model
}


def canonical_v4_name(name: str) -> str:
    """The name that DeepSeek gives a tensor; scales are called as those of other models.

    In: "model.hc_head.hc_fn", "layers.3.attn.wkv.scale".
    Out: "hc_head_fn", "layers.3.attn.wkv.weight_scale_inv".
    """
    name = name.removeprefix("model.")
    if name.startswith("hc_head.hc_"):
        return name.replace("hc_head.hc_", "hc_head_", 1)
    for start, own in _STARTS.items():
        if name.startswith(start):
            name = own + name.removeprefix(start)
    for end, own in _ENDS.items():
        if name.endswith(end):
            name = name.removesuffix(end) + own
    return name


def published_v4_shapes(config: V4Config) -> dict[str, Shape]:
    """Name and shape of every tensor that the checkpoint of `config` holds, MTP layers apart."""
    width = config.hidden_size
    shapes: dict[str, Shape] = {
        "embed.weight": (config.vocab_size, width),
        "norm.weight": (width,),
        "head.weight": (config.vocab_size, width),
        **hyper_head_shapes(config),
    }
    for layer in range(config.num_layers):
        parts = {
            **layer_shapes(config),
            **_entry_shapes(config, layer),
            **_moe_shapes(config, layer),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def v4_pieces(config: V4Config, like: Flat) -> dict[str, Pieces]:
    """What each of our arrays is made of, by the names of `like`, which has their shapes."""
    return {
        name: pieces_of(name, tuple(leaf.shape), _TOP, _IN_LAYER) for name, leaf in like.items()
    }


def v4_expert_names(config: SinceV4) -> list[str]:
    """Published names of the matrices of all routed experts."""
    return expert_names("layers", config.num_layers, config.num_experts)


def expert_names(root: str, layers: int, experts: int) -> list[str]:
    """Names of the matrices of all experts of the layers `root`.0, `root`.1, and so on."""
    return [
        f"{root}.{layer}.ffn.experts.{expert}.{matrix}.weight"
        for layer in range(layers)
        for expert in range(experts)
        for matrix in EXPERT.values()
    ]


def v4_integers(config: V4Config) -> dict[str, int]:
    """Published names of the tensors that hold numbers of experts, and how many there are."""
    layers = range(config.num_hash_layers)
    return {f"layers.{layer}.{_BY_TOKEN}": config.num_experts for layer in layers}


def pieces_of(
    name: str,
    shape: Shape,
    top: Mapping[str, str],
    in_layer: Mapping[str, str],
    root: str = "layers",
) -> Pieces:
    """What one array is made of: most are one tensor.

    Args:
        name: of our array.
        shape: of our array.
        top: names of whole tensors of the model.
        in_layer: names of whole tensors of a layer.
        root: what the published names of layers begin with.
    """
    turned = len(shape) == 2 and not name.endswith(_AS_PUBLISHED)
    if name in top:
        return whole_tensor(top[name], shape, transposed=turned and name != "embedding")
    _, layer, rest = name.split(".", 2)
    prefix = f"{root}.{layer}."
    if rest in in_layer:
        return whole_tensor(prefix + in_layer[rest], shape, transposed=turned)
    match rest.split("."):
        case ["attention", "out_a"]:
            return _groups(f"{prefix}attn.wo_a.weight", shape)
        case ["mlp", part]:
            return stacked_experts(f"{prefix}ffn.experts", EXPERT, part, shape)
        case ["mlp", "stored", part, kind]:
            return stored_experts(f"{prefix}ffn.experts", EXPERT[part], kind, shape)
    raise KeyError(name)  # a weight of the model that this table has forgotten


def _groups(name: str, shape: Shape) -> Pieces:
    """Matrices of groups of heads, which are published one below the other."""
    groups, rows, columns = shape
    return tuple(
        Piece(name, (group, 0, 0), (rows, columns), first=group * rows) for group in range(groups)
    )


def hyper_head_shapes(config: V4Sizes) -> dict[str, Shape]:
    """The sum of the streams after the last layer."""
    streams = config.streams
    return {
        "hc_head_fn": (streams, streams * config.hidden_size),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }


def layer_shapes(config: V4Sizes) -> dict[str, Shape]:
    """What every layer has but for experts: norms, connections and attention."""
    width = config.hidden_size
    return {
        "attn_norm.weight": (width,),
        "ffn_norm.weight": (width,),
        **_hyper_shapes(config),
        **_attention_shapes(config),
    }


def _hyper_shapes(config: V4Sizes) -> dict[str, Shape]:
    outputs = (2 + config.streams) * config.streams
    shapes: dict[str, Shape] = {}
    for site in ("attn", "ffn"):
        shapes |= {
            f"hc_{site}_fn": (outputs, config.streams * config.hidden_size),
            f"hc_{site}_base": (outputs,),
            f"hc_{site}_scale": (3,),
        }
    return shapes


def _attention_shapes(config: V4Sizes) -> dict[str, Shape]:
    heads, head, width = config.num_heads, config.head_dim, config.hidden_size
    latents = config.output_groups * config.output_lora_rank
    return {
        "attn.wq_a.weight": (config.q_lora_rank, width),
        "attn.q_norm.weight": (config.q_lora_rank,),
        "attn.wq_b.weight": (heads * head, config.q_lora_rank),
        "attn.wkv.weight": (head, width),
        "attn.kv_norm.weight": (head,),
        "attn.attn_sink": (heads,),
        "attn.wo_a.weight": (latents, heads // config.output_groups * head),
        "attn.wo_b.weight": (width, latents),
    }


def _entry_shapes(config: V4Config, layer: int) -> dict[str, Shape]:
    """What makes entries, and what chooses among them."""
    rate = config.rate(layer)
    if rate is None:
        return {}
    if config.layer_kinds[layer] != SELECTED:
        return _compressor_shapes(config, "attn.compressor", config.head_dim, rate, channels=1)
    return {
        **_compressor_shapes(config, "attn.compressor", config.head_dim, rate, channels=2),
        **indexer_shapes(config),
        **_compressor_shapes(config, "attn.indexer.compressor", config.index_dim, rate, channels=2),
    }


def indexer_shapes(config: V4Sizes) -> dict[str, Shape]:
    """Queries of an indexer, and weights of its heads."""
    index = config.index_heads * config.index_dim
    return {
        "attn.indexer.wq_b.weight": (index, config.q_lora_rank),
        "attn.indexer.weights_proj.weight": (config.index_heads, config.hidden_size),
    }


def _compressor_shapes(
    config: V4Config, name: str, width: int, rate: int, channels: int
) -> dict[str, Shape]:
    both = channels * width
    return {
        f"{name}.wkv.weight": (both, config.hidden_size),
        f"{name}.wgate.weight": (both, config.hidden_size),
        f"{name}.ape": (rate, both),
        f"{name}.norm.weight": (width,),
    }


def _moe_shapes(config: V4Config, layer: int) -> dict[str, Shape]:
    if layer >= config.num_hash_layers:
        return moe_shapes(config)
    shapes = moe_shapes(config)
    del shapes[_BIAS]
    return shapes | {_BY_TOKEN: (config.vocab_size, config.experts_per_token)}


def moe_shapes(config: V4Sizes) -> dict[str, Shape]:
    """Router and experts of a layer where the scores say who is chosen."""
    width, inner = config.hidden_size, config.expert_intermediate_size
    shapes: dict[str, Shape] = {
        "ffn.gate.weight": (config.num_experts, width),
        _BIAS: (config.num_experts,),
    }
    names = [f"ffn.experts.{expert}" for expert in range(config.num_experts)]
    for name in (*names, "ffn.shared_experts"):
        shapes |= {
            f"{name}.w1.weight": (inner, width),
            f"{name}.w3.weight": (inner, width),
            f"{name}.w2.weight": (width, inner),
        }
    return shapes
