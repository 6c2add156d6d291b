"""Models by name: the bundled one, or a checkpoint folder. What `--model` means."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

BUNDLED = {"tiny": Path(__file__).parent / "tiny"}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be served.

    Attributes:
        name: as it was asked for.
        model: the model as pure functions.
        params: its weights.
        tokenizer: text to token ids and back.
        context: most positions, prompt and new tokens together.
        eos: token ids that end a text.
    """

    name: str
    model: ServedModel
    params: Params
    tokenizer: Tokenizer
    context: int
    eos: tuple[int, ...]


def load(name: str, dtype: str = "float32") -> LoadedModel:
    """Load a model.

    Args:
        name: a bundled model's name, or the path of a Hugging Face checkpoint folder.
        dtype: "float32" or "bfloat16", of the computation and of what the hierarchy keeps.

    Raises:
        UserError: there is no such model, or its files are not usable.
    """
    if name in BUNDLED:
        return _load_bundled(name, dtype)
    directory = Path(name)
    if not directory.is_dir():
        known = ", ".join(BUNDLED)
        raise UserError(
            f"unknown model {name}: neither a bundled one ({known}) nor the folder of a checkpoint"
        )
    config, model = load_hf(directory, dtype=jnp.dtype(dtype))
    return _loaded(name, config, model, dtype, load_tokenizer(directory, config.vocab_size))


def _load_bundled(name: str, dtype: str) -> LoadedModel:
    """A model that is part of the package: bytes, between two start tokens."""
    config, model = load_checkpoint(BUNDLED[name], dtype=jnp.dtype(dtype))
    return _loaded(name, config, model, dtype, ByteTokenizer(start=config.bos_id))


def _loaded(
    name: str, config: GlmConfig, model: GlmModel, dtype: str, tokenizer: Tokenizer
) -> LoadedModel:
    served, params = serve(model, dtype)
    return LoadedModel(
        name=name,
        model=served,
        params=params,
        tokenizer=tokenizer,
        context=config.context,
        eos=config.eos_ids,
    )
