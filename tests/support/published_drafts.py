"""Draft checkpoints in the published forms, written without the loader's own tables."""

import json

import numpy as np
from safetensors.numpy import save_file

TOP = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_target_layers": 3,
    "block_size": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 2]},
}
DFLASH2 = TOP | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": TOP["dflash_config"]
    | {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
}
DSPARK = {name: value for name, value in TOP.items() if name != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": 255,
    "target_layer_ids": [0, 2],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "torch_dtype": "float32",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 255,
    "block_size": 4,
    "draft_vocab_size": 256,
    "markov_rank": 6,
    "transformer_layer_config": {
        name: TOP[name]
        for name in (
            *("model_type", "vocab_size", "hidden_size", "intermediate_size"),
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("rms_norm_eps", "rope_theta"),
        )
    },
}
CONFIGS = {"dflash": TOP, "dflash2": DFLASH2, "dspark": DSPARK, "speculators": SPECULATORS}


def layer_shapes(number, *, convolved):
    d, ff, q, kv, hd = 32, 48, 32, 16, 8
    shapes = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "self_attn.q_norm.weight": (hd,),
        "self_attn.k_norm.weight": (hd,),
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }
    if convolved:
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, 2, d)
            shapes[f"{name}.kernel_projection.weight"] = (2 * 2 * d // 8, d)
    return {f"layers.{number}.{name}": shape for name, shape in shapes.items()}


HEADS = {
    "dflash": {},
    "dflash2": {
        "candidate_selector.predecessor_codebook": (256, 6),
        "candidate_selector.successor_codebook": (256, 6),
        "candidate_selector.hidden_projection.weight": (6, 32),
    },
    "dspark": {
        "markov_head.markov_w1.weight": (256, 6),
        "markov_head.markov_w2.weight": (256, 6),
        "confidence_head.proj.weight": (1, 38),
        "confidence_head.proj.bias": (1,),
        "embed_tokens.weight": (256, 32),
        "lm_head.weight": (256, 32),
    },
}
HEADS["speculators"] = HEADS["dspark"]


def tensors(kind, seed=0):
    shapes = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for number in range(2):
        shapes |= layer_shapes(number, convolved=kind == "dflash2")
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in (shapes | HEADS[kind]).items()
    }


def write_draft(directory, kind, *, config=None, arrays=None):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or CONFIGS[kind]))
    save_file(arrays or tensors(kind), directory / "model.safetensors")
    return directory
