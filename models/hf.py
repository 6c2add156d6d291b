"""Loading a published checkpoint directory, a tensor at a time."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.arrays import Place
from dhisparse_jax.configs.quantised import FLOAT, name_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.entries import MTP_LAYERS, integer
from dhisparse_jax.models.families import EXPERTS, family_of, published_family
from dhisparse_jax.models.hf_config import eos_ids, read_json
from dhisparse_jax.models.params import (
    AnyConfig,
    AnyModel,
    Flat,
    Nested,
    abstract_params,
    build_model,
    flatten,
    loses_nothing,
    unflatten,
)
from dhisparse_jax.models.published import DEFAULT_BLOCK, Published, weight_block
from dhisparse_jax.models.stream import Pieces, load_arrays, on_first_device

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_MTP_PART = re.compile(_LAYER.pattern + r"(?:eh_proj|enorm|hnorm)\.")
"""What an MTP layer has and no layer of the model."""


class Loaded(NamedTuple):
    """A checkpoint directory as a model.

    Attributes:
        config: sizes.
        model: the model.
        unused: sorted names of tensors that it does not use: of MTP layers, and of other parts.
    """

    config: AnyConfig
    model: AnyModel
    unused: tuple[str, ...]


def load_hf(
    directory: Path | str,
    *,
    dtype: jnp.dtype | type | None = None,
    stored_experts: bool = True,
    place: Place = on_first_device,
) -> Loaded:
    """Loads `config.json` and the safetensors beside it.

    Tensors may have transformers' names or DeepSeek's, and be quantised. Quantised weights become
    numbers of the compute dtype, but for those of routed experts, which stay as they are stored.
    Beside the result, the host holds no more than a few blocks of `models.stream`.

    Args:
        directory: Holds config.json and model.safetensors, or shards and their index.
        dtype: Compute dtype of the model; None: that of the configuration, and weights keep what
            they are.
        stored_experts: Whether quantised experts stay so.
        place: Where each array goes, from its flat name and shape.

    Raises:
        UserError: Missing or damaged files, another model, or tensors that are missing, left over,
            wrongly shaped, or of an unsupported type.
    """
    directory = Path(directory)
    config, block, mtp_layers = read_config(directory)
    tensors = find_tensors(directory, config, block, mtp_layers)
    for entry, names in family_of(config).stored(config).items():
        if stored_experts or entry != EXPERTS:
            own: dict[str, Any] = {entry: stored_format(names, tensors)}
            config = dataclasses.replace(config, **own)
    derived = family_of(config).derived(config, directory)
    like = abstract_params(config)
    pieces = family_of(config).pieces(config, flatten(like))
    params = load_params(like, pieces, tensors, derived, dtype, place)
    model = build_model(config, params, jnp.dtype(dtype or config.param_dtype))
    return Loaded(config, model, tensors.unused)


def read_config(directory: Path) -> tuple[AnyConfig, tuple[int, int], int]:
    """Sizes of the model, those of the blocks of quantised weights, and how many MTP layers follow.

    A text ends with the ids of `config.json`, and with those of `generation_config.json` where
    there is one.

    Raises:
        UserError: `config.json` is missing or damaged, or of a model that is not supported.
    """
    path, generation = directory / "config.json", directory / "generation_config.json"
    raw = read_json(path)
    try:
        config = published_family(raw).parse(raw)
        block = weight_block(raw.get("quantization_config"))
        mtp_layers = max(1, integer(raw, MTP_LAYERS, 1))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if generation.is_file():
        settings = read_json(generation)
        try:
            more = eos_ids(settings)
        except UserError as error:
            raise UserError(f"{generation}: {error}") from error
        ends = tuple(dict.fromkeys((*config.eos_ids, *more)))
        config = dataclasses.replace(config, eos_ids=ends)
    return config, block, mtp_layers


def find_tensors(
    directory: Path,
    config: AnyConfig,
    block: tuple[int, int] = DEFAULT_BLOCK,
    mtp_layers: int = 1,
) -> Published:
    """Locates every tensor of the model and checks names, shapes and types from the headers.

    Those of so many MTP layers behind the last one are recognised, and not used.

    Raises:
        UserError: See `load_hf`.
    """
    family = family_of(config)
    return Published(
        directory,
        family.shapes(config),
        block=block,
        blocks=family.blocks(config),
        canonical=family.canonical,
        ignored=lambda names: [
            *_mtp_tensors(names, config.num_layers, mtp_layers),
            *filter(family.unused, names),
        ],
        integers=family.integers(config),
    )


def _mtp_tensors(names: Collection[str], num_layers: int, mtp_layers: int) -> list[str]:
    """Tensors of the MTP layers behind the last one of the model.

    A layer there that has no part of its own kind is none: the number of layers is wrong.
    """
    behind = range(num_layers, num_layers + mtp_layers)
    layers = {name: int(match[1]) for name in names if (match := _LAYER.match(name))}
    proposing = {layers[name] for name in layers if _MTP_PART.match(name)}.intersection(behind)
    return [name for name in names if name.startswith("mtp.") or layers.get(name) in proposing]


def stored_format(names: Sequence[str], tensors: Published) -> str:
    """The name of the format that all these tensors have.

    Raises:
        UserError: They have several, or one that is not supported.
    """
    if not names:
        return FLOAT
    first, formats = names[0], {name: tensors.quantised[name].weights for name in tensors.quantised}
    for name in names:
        if formats.get(name) != formats.get(first):
            raise UserError(
                f"{tensors.headers[name].file}: {tensors.headers[name].name} is not quantised as "
                f"{tensors.headers[first].name} is; load it "
                "with --experts float"
            )
    return name_of(formats[first]) if first in formats else FLOAT


def load_params(
    nested: Nested,
    pieces: Mapping[str, Pieces],
    tensors: Published,
    derived: Flat,
    dtype: jnp.dtype | type | None,
    place: Place,
) -> Nested:
    """The nested weights.

    Those that are dequantised, or stored as more than the configuration says, get the compute
    dtype, which loses least.

    Args:
        nested: their shapes and dtypes.
        pieces: what each is made of, by flat names, but for `derived`.
        tensors: where they are.
        derived: arrays that are in no tensor, by flat names.
        dtype: of the computation; None: the least that loses nothing.
        place: where each array goes, from its flat name and shape.

    Raises:
        UserError: a tensor cannot be read.
    """
    like = flatten(nested)
    for name, parts in pieces.items():
        kept = _kept_dtype(like[name].dtype, parts, tensors, dtype)
        like[name] = jax.ShapeDtypeStruct(like[name].shape, kept)
    own = {name: jax.device_put(leaf, place(name, leaf.shape)) for name, leaf in derived.items()}
    read = {name: leaf for name, leaf in like.items() if name not in own}
    return unflatten(load_arrays(read, pieces, tensors.rows, place=place) | own, nested)


def _kept_dtype(
    own: np.dtype, parts: Pieces, tensors: Published, dtype: jnp.dtype | type | None
) -> np.dtype:
    """The dtype of an array of the model that the configuration has in `own`."""
    if not jnp.issubdtype(own, jnp.floating) or any(part.stored for part in parts):
        return own
    names = {part.name for part in parts}
    kinds = {tensors.exact_dtype(name) for name in names}
    chosen = dtype is not None and names & tensors.quantised.keys()
    if not chosen and all(loses_nothing(kind, own) for kind in kinds):
        return own
    return np.dtype(dtype or (kinds.pop() if len(kinds) == 1 else np.float32))
