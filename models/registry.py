"""Models by name: the bundled one, or a checkpoint folder. What `--model` means."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.models.attached.load import attached_tensors
from dhisparse_jax.models.checkpoint import (
    CONVERSION_FILE,
    OWN_WEIGHTS,
    load_checkpoint,
    load_config,
)
from dhisparse_jax.models.families import served
from dhisparse_jax.models.hf import load_hf, read_config
from dhisparse_jax.models.history import with_formats
from dhisparse_jax.models.params import AnyConfig
from dhisparse_jax.models.placement import placement
from dhisparse_jax.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

BUNDLED = {"tiny": Path(__file__).parent / "tiny"}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be served.

    Attributes:
        name: as it was asked for.
        directory: where its files are.
        model: the model as pure functions.
        params: its weights.
        tokenizer: text to token ids and back.
        context: most positions, prompt and new tokens together.
        eos: token ids that end a text.
        unused: names of tensors of a published checkpoint that the model has no use for.
        drafts: names of tensors of a published checkpoint that are of the drafter attached to it.
        mesh: devices that its weights are on; None: the first one.
    """

    name: str
    directory: Path
    model: ServedModel
    params: Params
    tokenizer: Tokenizer
    context: int
    eos: tuple[int, ...]
    unused: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    mesh: Mesh | None = None


def load(
    name: str,
    dtype: str = "float32",
    *,
    stored_experts: bool = True,
    kv_format: str | None = None,
    index_format: str | None = None,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        name: a bundled model's name, or the path of a checkpoint folder: a Hugging Face one, or
            one that `models.checkpoint` wrote.
        dtype: "float32" or "bfloat16", of the computation, and of what the hierarchy keeps unless
            something else is asked for.
        stored_experts: whether experts of a Hugging Face checkpoint that are quantised stay so.
        kv_format: format of rows (`configs.formats`); None: what the model's files say.
        index_format: format of index keys, likewise.
        mesh: devices that the weights go to, see `models.placement`; None: the first one.

    Raises:
        UserError: there is no such model, its files are not usable, or its experts do not divide
            over the mesh.
    """
    directory = BUNDLED.get(name, Path(name))
    if not directory.is_dir():
        known = ", ".join(BUNDLED)
        raise UserError(
            f"unknown model {name}: neither a bundled one ({known}) nor the folder of a checkpoint"
        )
    compute, place = jnp.dtype(dtype), placement(mesh)
    with_formats(_config(directory), kv_format, index_format)  # refused before weights are read
    if (directory / OWN_WEIGHTS).is_dir():
        (config, model), unused = load_checkpoint(directory, dtype=compute, place=place), ()
        drafts = ()
    else:
        config, model, unused = load_hf(
            directory, dtype=compute, stored_experts=stored_experts, place=place
        )
        drafts = attached_tensors(directory, unused)
    tokenizer, ends = _text(directory, config)
    functions, params = served(model, dtype, kv_format, index_format)
    return LoadedModel(
        name=name,
        directory=directory,
        model=functions,
        params=params,
        tokenizer=tokenizer,
        context=config.context,
        eos=ends,
        unused=tuple(name for name in unused if name not in set(drafts)),
        drafts=drafts,
        mesh=mesh,
    )


def _config(directory: Path) -> AnyConfig:
    """What the files say of a model before its tensors are looked at."""
    if (directory / OWN_WEIGHTS).is_dir():
        return load_config(directory)
    return read_config(directory)[0]


def _text(directory: Path, config: AnyConfig) -> tuple[Tokenizer, tuple[int, ...]]:
    """How a model's text is read, and the ids that end one.

    Training writes models of bytes, whose documents begin and end with one token.
    """
    own = (directory / OWN_WEIGHTS).is_dir() and not (directory / CONVERSION_FILE).is_file()
    if not own:
        return load_tokenizer(directory, config.vocab_size), config.eos_ids
    ends = config.eos_ids if config.bos_id is None else (*config.eos_ids, config.bos_id)
    return ByteTokenizer(start=config.bos_id), ends
