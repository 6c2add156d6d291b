"""Small random checkpoints, in the published form and in the project's own."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dhisparse_jax.models.checkpoint import save_checkpoint
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.hf_config import parse_config
from dhisparse_jax.models.hf_tensors import pieces_of, published_shapes
from dhisparse_jax.models.params import abstract_params, flatten, unflatten
from dhisparse_jax.models.stream import load_arrays

CONTEXT = 192
TOKENS = 48
PUBLISHED = {
    "model_type": "glm_moe_dsa",
    "dtype": "float32",
    "vocab_size": 256,
    "max_position_embeddings": CONTEXT,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "indexer_types": ["full", "shared", "full"],
    "rope_theta": 10000.0,
}


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of PUBLISHED by their published names; scales keep activations near one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in published_shapes(parse_config(PUBLISHED)).items():
        values = rng.normal(size=shape) / math.sqrt(shape[-1] if len(shape) > 1 else 16)
        tensors[name] = (values + ("norm" in name)).astype(np.float32)
    return tensors


def write_published(directory: Path, seed: int = 0) -> None:
    """A checkpoint folder with inputs.npy, and logits.npy from the whole-sequence forward."""
    (directory / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(random_tensors(seed), directory / "model.safetensors")
    model = load_hf(directory, dtype=jnp.float32).model
    tokens = np.random.default_rng(seed).integers(0, 256, (1, TOKENS))
    np.save(directory / "inputs.npy", tokens)
    logits = forward(model, jnp.asarray(tokens, jnp.int32), mode="sparse")
    np.save(directory / "logits.npy", np.asarray(logits))


def write_own(directory: Path, seed: int = 0, **changes: object) -> None:
    """A checkpoint as training writes it."""
    config, tensors = parse_config(PUBLISHED | changes), random_tensors(seed)
    like = abstract_params(config)
    pieces = pieces_of(config, flatten(like))
    flat = load_arrays(flatten(like), pieces, lambda name, rows, _: tensors[name][rows])
    save_checkpoint(directory, config, unflatten(flat, like))
