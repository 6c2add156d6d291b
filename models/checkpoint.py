"""Saving and restoring a model: `config.json`, and the weights in an Orbax directory beside it.

A checkpoint does not depend on the devices that it was saved from: whoever restores it says where
each array goes.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.arrays import DATA_FILE_BYTES, Place, Shapes, load_arrays, save_arrays
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.families import own_config, own_values
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.params import (
    AnyConfig,
    AnyModel,
    Flat,
    Nested,
    abstract_params,
    build_model,
    cast_like,
    flatten,
    loses_nothing,
    unflatten,
)
from dhisparse_jax.models.stream import on_first_device
from dhisparse_jax.models.text import few

OWN_WEIGHTS = "params"
"""The folder of weights in a checkpoint that is written here; published ones have none."""

CONFIG_FILE = "config.json"

CONVERSION_FILE = "conversion.json"
"""In a checkpoint of ours that was a published one: what of that was not used."""


def save_checkpoint(directory: Path | str, config: AnyConfig, params: Nested) -> None:
    """Writes a checkpoint, replacing the one in `directory`.

    Args:
        directory: Where to write; created if need be.
        config: Sizes; `config.param_dtype` is the dtype that weights are written in, except for
            those the model always keeps in float32.
        params: Nested weights of a model of these sizes.
    """
    directory = Path(directory)
    save_weights(directory / OWN_WEIGHTS, flatten(cast_like(params, abstract_params(config))))
    save_config(directory, config)


def save_config(directory: Path, config: AnyConfig) -> None:
    """Writes the sizes of a checkpoint."""
    save_json(directory / CONFIG_FILE, own_values(config, dataclasses.asdict(config)))


def save_weights(path: Path, flat: Flat, file_bytes: int = DATA_FILE_BYTES) -> None:
    """Writes flat weights as an Orbax folder, replacing the one at `path`; see `save_arrays`."""
    save_arrays(path, flat, file_bytes)


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object; a file that is there is replaced when the new one is whole."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def load_config(directory: Path) -> AnyConfig:
    """The sizes of a checkpoint, as `save_config` wrote them.

    Raises:
        UserError: They are missing or damaged, or of a model that is not known.
    """
    return own_config(read_json(directory / CONFIG_FILE))


def load_checkpoint(
    directory: Path | str,
    *,
    dtype: jnp.dtype | type | None = None,
    place: Place = on_first_device,
) -> tuple[AnyConfig, AnyModel]:
    """Restores a model.

    Args:
        directory: What `save_checkpoint` or `models.convert` wrote.
        dtype: Compute dtype of the model; None: that of the configuration.
        place: Where each array goes, from its flat name and shape.

    Raises:
        UserError: No checkpoint there, a damaged one, or weights that are missing, left over, or
            wrongly shaped.
    """
    directory = Path(directory).absolute()
    config = load_config(directory)
    like = abstract_params(config)
    flat = restore_weights(directory / OWN_WEIGHTS, flatten(like), dtype, place)
    params = unflatten(flat, like)
    return config, build_model(config, params, jnp.dtype(dtype or config.param_dtype))


def restore_weights(
    path: Path,
    expected: Flat,
    dtype: jnp.dtype | type | None = None,
    place: Place = on_first_device,
) -> dict[str, jax.Array]:
    """Flat arrays, if names and shapes are those expected.

    They have the dtypes they were saved in; those saved as more than the configuration says get the
    compute dtype, if there is one.

    Raises:
        UserError: No weights there, damaged ones, or some missing, left over, or wrongly shaped.
    """
    try:
        return load_arrays(
            path,
            lambda shapes: _check(expected, shapes),
            place,
            lambda name, stored: _restored_dtype(np.dtype(expected[name].dtype), stored, dtype),
        )
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no checkpoint: {path.name}/ is missing") from None
    except ValueError as error:
        raise UserError(f"the checkpoint in {path} is damaged: {error}") from error


def _restored_dtype(own: np.dtype, stored: np.dtype, dtype: jnp.dtype | type | None) -> np.dtype:
    """The dtype of an array that the configuration has in `own`."""
    return stored if dtype is None or loses_nothing(stored, own) else np.dtype(dtype)


def _check(expected: Flat, found: Shapes) -> None:
    """Names and shapes agree."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        shapes = [f"{name} {list(expected[name].shape)}" for name in missing]
        raise UserError(f"the checkpoint lacks {len(missing)} weights: {few(shapes)}")
    if extra:
        raise UserError(f"the checkpoint has {len(extra)} weights too many: {few(extra)}")
    wrong = [
        f"{name} is {list(shape)}, expected {list(expected[name].shape)}"
        for name, shape in found.items()
        if shape != tuple(expected[name].shape)
    ]
    if wrong:
        raise UserError(f"{len(wrong)} weights have the wrong shape: {few(wrong)}")
