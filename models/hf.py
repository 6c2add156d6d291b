"""Loading a published checkpoint directory, a tensor at a time."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dhisparse_jax.arrays import Place
from dhisparse_jax.configs.quantised import FLOAT, name_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.families import family_of, published_family
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.params import (
    AnyConfig,
    AnyModel,
    Nested,
    abstract_params,
    build_model,
    flatten,
    unflatten,
)
from dhisparse_jax.models.published import DEFAULT_BLOCK, Published, weight_block
from dhisparse_jax.models.stream import load_arrays, on_first_device

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


class Loaded(NamedTuple):
    """A checkpoint directory as a model.

    Attributes:
        config: sizes.
        model: the model.
        unused: sorted names of tensors, all of MTP layers, that it does not use.
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
        dtype: Compute dtype of the model; the dtype of the weights when None.
        stored_experts: Whether quantised experts stay so.
        place: Where each array goes, from its flat name and shape.

    Raises:
        UserError: Missing or damaged files, another model, or tensors that are missing, left over,
            wrongly shaped, or of an unsupported type.
    """
    directory = Path(directory)
    config, block = read_config(directory)
    tensors = find_tensors(directory, config, block)
    if tensors.unused:
        log.info("%d tensors of MTP layers are not used", len(tensors.unused))
    if stored_experts:
        config = dataclasses.replace(config, expert_format=_expert_format(config, tensors))
    dtype = jnp.dtype(dtype or config.param_dtype)
    params = _load_params(config, tensors, dtype, place)
    return Loaded(config, build_model(config, params, dtype), tensors.unused)


def read_config(directory: Path) -> tuple[AnyConfig, tuple[int, int]]:
    """Sizes of the model, and those of the blocks of quantised weights.

    Raises:
        UserError: `config.json` is missing or damaged, or of a model that is not supported.
    """
    path = directory / "config.json"
    raw = read_json(path)
    try:
        config = published_family(raw).parse(raw)
        return config, weight_block(raw.get("quantization_config"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def find_tensors(
    directory: Path, config: AnyConfig, block: tuple[int, int] = DEFAULT_BLOCK
) -> Published:
    """Locates every tensor of the model and checks names, shapes and types from the headers.

    Raises:
        UserError: See `load_hf`.
    """
    family = family_of(config)
    return Published(
        directory,
        family.shapes(config),
        block=block,
        canonical=family.canonical,
        ignored=lambda name: _is_mtp(name, config.num_layers),
        integers=family.integers(config),
    )


def _is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer behind the last one of the model."""
    match = _LAYER.match(name)
    return name.startswith("mtp.") or (match is not None and int(match[1]) >= num_layers)


def _expert_format(config: AnyConfig, tensors: Published) -> str:
    """The name of the format that all routed experts have.

    Raises:
        UserError: They have several, or one that is not supported.
    """
    names = family_of(config).expert_names(config)
    if not names:
        return FLOAT
    first, formats = names[0], {name: tensors.quantised[name].weights for name in tensors.quantised}
    for name in names:
        if formats.get(name) != formats.get(first):
            raise UserError(
                f"{tensors.headers[name].file}: {name} is not quantised as {first} is; load it "
                "with --experts float"
            )
    return name_of(formats[first]) if first in formats else FLOAT


def _load_params(config: AnyConfig, tensors: Published, dtype: jnp.dtype, place: Place) -> Nested:
    """The nested weights. Those that are dequantised get the compute dtype, which loses least."""
    nested = abstract_params(config)
    like = flatten(nested)
    pieces = family_of(config).pieces(config, like)
    for name, parts in pieces.items():
        if any(part.name in tensors.quantised and not part.stored for part in parts):
            like[name] = jax.ShapeDtypeStruct(like[name].shape, dtype)
    return unflatten(load_arrays(like, pieces, tensors.rows, place=place), nested)
