"""Published tensors of GLM-5.x and DeepSeek-V3.2: names, shapes, and where they go in our weights.

Knows nothing about files. Published matrices are `[out, in]`; ours are `[in, out]`, except for
experts that stay quantised.
"""

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.params import Flat
from dhisparse_jax.models.pieces import stacked_experts, stored_experts, whole_tensor
from dhisparse_jax.models.stream import Piece, Pieces
from dhisparse_jax.models.tensor_files import Shape

# Our name: the published one.
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
_IN_LAYER = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "attention.q_a.kernel": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_b.kernel": "self_attn.q_b_proj.weight",
    "attention.kv_a.kernel": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "indexer.wq.kernel": "self_attn.indexer.wq_b.weight",
    "indexer.wk.kernel": "self_attn.indexer.wk.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.head_weights": "self_attn.indexer.weights_proj.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
    "mlp.router.kernel": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate.kernel": "mlp.shared_experts.gate_proj.weight",
    "mlp.shared.up.kernel": "mlp.shared_experts.up_proj.weight",
    "mlp.shared.down.kernel": "mlp.shared_experts.down_proj.weight",
}
_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_UP_PROJECTIONS = "self_attn.kv_b_proj.weight"


def published_shapes(config: GlmConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that the checkpoint of `config` holds, MTP layers apart."""
    width = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config.vocab_size, width),
    }
    for layer in range(config.num_layers):
        parts = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            **_attention_shapes(config),
            **(_indexer_shapes(config) if config.indexer_types[layer] == "full" else {}),
            **(
                _mlp_shapes("mlp", width, config.dense_intermediate_size)
                if layer < config.num_dense_layers
                else _moe_shapes(config)
            ),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def pieces_of(config: GlmConfig, like: Flat) -> dict[str, Pieces]:
    """What each of our arrays is made of, by the names of `like`, which has their shapes."""
    return {name: _pieces(config, name, tuple(leaf.shape)) for name, leaf in like.items()}


def expert_names(config: GlmConfig) -> list[str]:
    """Published names of the matrices of all routed experts."""
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
        for layer in range(config.num_dense_layers, config.num_layers)
        for expert in range(config.num_experts)
        for matrix in _EXPERT.values()
    ]


def _pieces(config: GlmConfig, name: str, shape: Shape) -> Pieces:
    """What one array is made of: most are one tensor."""
    if name in _TOP:
        return whole_tensor(_TOP[name], shape, transposed=name == "head.kernel")
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest in _IN_LAYER:
        return whole_tensor(prefix + _IN_LAYER[rest], shape, transposed=len(shape) == 2)
    match rest.split("."):
        case ["attention", part]:
            return _heads(config, prefix + _UP_PROJECTIONS, part, shape)
        case ["mlp", part]:
            return stacked_experts(f"{prefix}mlp.experts", _EXPERT, part, shape)
        case ["mlp", "stored", part, kind]:
            return stored_experts(f"{prefix}mlp.experts", _EXPERT[part], kind, shape)
    raise KeyError(name)  # a weight of the model that this table has forgotten


def _heads(config: GlmConfig, name: str, part: str, shape: Shape) -> Pieces:
    """Key or value up-projections, which are one published matrix: keys, then values, per head."""
    heads, rows, columns = shape
    both = config.qk_nope_dim + config.v_dim
    skipped = config.qk_nope_dim if part == "w_uv" else 0
    return tuple(
        Piece(name, (head, 0, 0), (rows, columns), first=head * both + skipped)
        for head in range(heads)
    )


def _attention_shapes(config: GlmConfig) -> dict[str, Shape]:
    heads, width = config.num_heads, config.hidden_size
    return {
        "self_attn.q_a_proj.weight": (config.q_lora_rank, width),
        "self_attn.q_a_layernorm.weight": (config.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * config.qk_dim, config.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (config.row_dim, width),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (
            heads * (config.qk_nope_dim + config.v_dim),
            config.kv_lora_rank,
        ),
        "self_attn.o_proj.weight": (width, heads * config.v_dim),
    }


def _indexer_shapes(config: GlmConfig) -> dict[str, Shape]:
    return {
        "self_attn.indexer.wq_b.weight": (
            config.index_heads * config.index_dim,
            config.q_lora_rank,
        ),
        "self_attn.indexer.wk.weight": (config.index_dim, config.hidden_size),
        "self_attn.indexer.weights_proj.weight": (config.index_heads, config.hidden_size),
        "self_attn.indexer.k_norm.weight": (config.index_dim,),
        "self_attn.indexer.k_norm.bias": (config.index_dim,),
    }


def _mlp_shapes(name: str, width: int, inner: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


def _moe_shapes(config: GlmConfig) -> dict[str, Shape]:
    width, inner = config.hidden_size, config.expert_intermediate_size
    shapes: dict[str, Shape] = {
        "mlp.gate.weight": (config.num_experts, width),
        "mlp.gate.e_score_correction_bias": (config.num_experts,),
    }
    for expert in range(config.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", width, inner)
    if config.num_shared_experts:
        shapes |= _mlp_shapes("mlp.shared_experts", width, config.num_shared_experts * inner)
    return shapes
