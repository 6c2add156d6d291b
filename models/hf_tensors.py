"""Published tensors of GLM-5.x: their names and shapes, and how they become our weights.

Knows nothing about files. Published matrices are `[out, in]`; ours are `[in, out]`.
"""

from typing import Any

import numpy as np

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.tensor_files import Read, Shape


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


def build_params(config: GlmConfig, read: Read) -> dict[str, Any]:
    """Our nested weights from the published tensors that `read` returns by name."""
    layers = {
        layer: _layer(config, layer, _within(read, f"model.layers.{layer}."))
        for layer in range(config.num_layers)
    }
    return {
        "embedding": read("model.embed_tokens.weight"),
        "layers": layers,
        "norm": {"weight": read("model.norm.weight")},
        "head": {"kernel": read("lm_head.weight").T},
    }


def _within(read: Read, prefix: str) -> Read:
    """Reads names relative to `prefix`."""
    return lambda name: read(prefix + name)


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


def _layer(config: GlmConfig, layer: int, read: Read) -> dict[str, Any]:
    built = {
        "input_norm": {"weight": read("input_layernorm.weight")},
        "attention": _attention(config, _within(read, "self_attn.")),
        "post_norm": {"weight": read("post_attention_layernorm.weight")},
    }
    if config.indexer_types[layer] == "full":
        built["indexer"] = _indexer(_within(read, "self_attn.indexer."))
    mlp = _within(read, "mlp.")
    built["mlp"] = _mlp(mlp) if layer < config.num_dense_layers else _moe(config, mlp)
    return built


def _attention(config: GlmConfig, read: Read) -> dict[str, Any]:
    """The key and value up-projections are one published matrix, head by head."""
    kv_b = read("kv_b_proj.weight").reshape(config.num_heads, -1, config.kv_lora_rank)
    return {
        "q_a": {"kernel": read("q_a_proj.weight").T},
        "q_norm": {"weight": read("q_a_layernorm.weight")},
        "q_b": {"kernel": read("q_b_proj.weight").T},
        "kv_a": {"kernel": read("kv_a_proj_with_mqa.weight").T},
        "kv_norm": {"weight": read("kv_a_layernorm.weight")},
        "w_uk": kv_b[:, : config.qk_nope_dim],
        "w_uv": kv_b[:, config.qk_nope_dim :],
        "out": {"kernel": read("o_proj.weight").T},
    }


def _indexer(read: Read) -> dict[str, Any]:
    return {
        "wq": {"kernel": read("wq_b.weight").T},
        "wk": {"kernel": read("wk.weight").T},
        "k_norm": {"weight": read("k_norm.weight"), "bias": read("k_norm.bias")},
        "head_weights": read("weights_proj.weight").T,
    }


def _mlp(read: Read) -> dict[str, Any]:
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {ours: {"kernel": read(f"{theirs}.weight").T} for ours, theirs in names.items()}


def _moe(config: GlmConfig, read: Read) -> dict[str, Any]:
    """Stacks the experts; their gate and up matrices become one, side by side."""
    experts = [_mlp(_within(read, f"experts.{i}.")) for i in range(config.num_experts)]
    gate_up = [
        np.concatenate((expert["gate"]["kernel"], expert["up"]["kernel"]), axis=1)
        for expert in experts
    ]
    built = {
        "router": {
            "kernel": read("gate.weight").T,
            "bias": read("gate.e_score_correction_bias").astype(np.float32),
        },
        "gate_up": np.stack(gate_up),
        "down": np.stack([expert["down"]["kernel"] for expert in experts]),
    }
    if config.num_shared_experts:
        built["shared"] = _mlp(_within(read, "shared_experts."))
    return built
