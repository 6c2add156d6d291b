"""Small random checkpoints, in the published form and in the project's own."""

import json
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.models.checkpoint import save_checkpoint
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.hf_config import parse_config
from dhisparse_jax.models.hf_tensors import pieces_of, published_shapes
from dhisparse_jax.models.params import abstract_params, flatten, unflatten
from dhisparse_jax.models.stream import load_arrays
from tests.support.quantised import NAMES, exact, quantise, write_tensors

FLOAT_MATRICES = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "s_proj.weight")
"""Ends of the names of matrices that stay floats; the last is the indexer's `weights_proj`."""

DEEPSEEK_PARTS = (
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp", "ffn"),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
    ("self_attn", "attn"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("q_a_proj", "wq_a"),
    ("q_a_layernorm", "q_norm"),
    ("q_b_proj", "wq_b"),
    ("kv_a_proj_with_mqa", "wkv_a"),
    ("kv_a_layernorm", "kv_norm"),
    ("kv_b_proj", "wkv_b"),
    ("o_proj", "wo"),
    ("embed_tokens", "embed"),
    ("lm_head", "head"),
)
"""Parts of names: transformers', and DeepSeek's."""

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


def random_tensors(seed: int = 0, raw: dict = PUBLISHED) -> dict[str, np.ndarray]:
    """Tensors of a configuration by their published names; scales keep activations near one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in published_shapes(parse_config(raw)).items():
        values = rng.normal(size=shape) / math.sqrt(shape[-1] if len(shape) > 1 else 16)
        tensors[name] = (values + ("norm" in name)).astype(np.float32)
    return tensors


def quantised_tensors(
    raw: dict, dense: str, experts: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors of `random_tensors` in two formats, with scales, and what they stand for.

    As in published files: matrices of attention, indexer and MLP, but no router, head or embedding.
    """
    stored, plain = {}, random_tensors(raw=raw)
    for name, values in list(plain.items()):
        weights = FORMATS[experts if ".experts." in name else dense]
        if values.ndim < 2 or name.endswith(FLOAT_MATRICES):
            stored[name] = values
            continue
        stored[name], scales = quantise(values, weights)
        stored[f"{name}_scale_inv"] = scales
        plain[name] = exact(stored[name], scales, weights).astype(np.float32)
    return stored, plain


def write_shards(directory: Path, tensors: dict[str, np.ndarray]) -> tuple[Path, Path]:
    """Two files, with the first and second half of the names, and their index."""
    names = sorted(tensors)
    half = len(names) // 2
    paths = []
    where = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        paths.append(directory / f"model-{number:05}-of-00002.safetensors")
        write_tensors(paths[-1], {name: tensors[name] for name in part})
        where |= dict.fromkeys(part, paths[-1].name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return paths[0], paths[1]


def deepseek_name(name: str) -> str:
    """DeepSeek's own name of a tensor, by replacing one part after the other."""
    for theirs, ours in DEEPSEEK_PARTS:
        name = re.sub(rf"(^|\.){re.escape(theirs)}(\.|$)", rf"\g<1>{ours}\g<2>", name)
    return name.removeprefix("model.").replace(".weight_scale_inv", ".scale")


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


def write_sparse(directory: Path, raw: dict) -> int:
    """A checkpoint of two shards of zeros, which take no room; the bytes of its largest tensor."""
    shapes = published_shapes(parse_config(raw))
    dtype = np.dtype(jnp.dtype(raw["dtype"]))
    names = sorted(shapes)
    sizes = {name: math.prod(shapes[name]) * dtype.itemsize for name in names}
    where = {}
    for number in range(2):
        header, at, part = {}, 0, names[number::2]
        for name in part:
            header[name] = {
                "dtype": NAMES[dtype.name],
                "shape": shapes[name],
                "data_offsets": [at, at + sizes[name]],
            }
            at += sizes[name]
        text = json.dumps(header).encode()
        path = directory / f"model-{number}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
        where |= dict.fromkeys(part, path.name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return max(sizes.values())
