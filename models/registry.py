"""Models by name: the bundled one, or a checkpoint folder. What `--model` means."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.models.checkpoint import CONVERSION_FILE, OWN_WEIGHTS, load_checkpoint
from dhisparse_jax.models.families import served
from dhisparse_jax.models.hf import load_hf
from dhisparse_jax.models.params import AnyConfig, AnyModel
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


def load(name: str, dtype: str = "float32", *, stored_experts: bool = True) -> LoadedModel:
    """Load a model.

    Args:
        name: a bundled model's name, or the path of a checkpoint folder: a Hugging Face one, or
            one that `models.checkpoint` wrote.
        dtype: "float32" or "bfloat16", of the computation and of what the hierarchy keeps.
        stored_experts: whether experts of a Hugging Face checkpoint that are quantised stay so.

    Raises:
        UserError: there is no such model, or its files are not usable.
    """
    directory = BUNDLED.get(name, Path(name))
    if not directory.is_dir():
        known = ", ".join(BUNDLED)
        raise UserError(
            f"unknown model {name}: neither a bundled one ({known}) nor the folder of a checkpoint"
        )
    if (directory / OWN_WEIGHTS).is_dir():
        return _load_own(name, directory, dtype)
    loaded = load_hf(directory, dtype=jnp.dtype(dtype), stored_experts=stored_experts)
    return _published(name, directory, loaded.config, loaded.model, dtype)


def _load_own(name: str, directory: Path, dtype: str) -> LoadedModel:
    """What training or a conversion wrote.

    Training writes models of bytes, whose documents begin and end with one token.
    """
    config, model = load_checkpoint(directory, dtype=jnp.dtype(dtype))
    if (directory / CONVERSION_FILE).is_file():
        return _published(name, directory, config, model, dtype)
    ends = config.eos_ids if config.bos_id is None else (*config.eos_ids, config.bos_id)
    return _loaded(name, config, model, dtype, ByteTokenizer(start=config.bos_id), ends)


def _published(
    name: str, directory: Path, config: AnyConfig, model: AnyModel, dtype: str
) -> LoadedModel:
    tokenizer = load_tokenizer(directory, config.vocab_size)
    return _loaded(name, config, model, dtype, tokenizer, config.eos_ids)


def _loaded(
    name: str,
    config: AnyConfig,
    model: AnyModel,
    dtype: str,
    tokenizer: Tokenizer,
    eos: tuple[int, ...],
) -> LoadedModel:
    functions, params = served(model, dtype)
    return LoadedModel(
        name=name,
        model=functions,
        params=params,
        tokenizer=tokenizer,
        context=config.context,
        eos=eos,
    )
