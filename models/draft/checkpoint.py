"""Saving and restoring a draft: `draft.json`, and the weights in an Orbax directory beside it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import (
    OWN_WEIGHTS,
    restore_weights,
    save_json,
    save_weights,
)
from dhisparse_jax.models.draft.backbone import DraftModel
from dhisparse_jax.models.draft.config import DraftConfig, MarkovConfig, SelectorConfig
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.params import Nested, cast_like, fill, flatten, params_of, unflatten

CONFIG_FILE = "draft.json"


def make_draft(config: DraftConfig, dtype: jnp.dtype | type, seed: int = 0) -> DraftModel:
    """A draft with random weights."""
    return DraftModel(config, rngs=nnx.Rngs(seed), dtype=dtype)


def abstract_model(config: DraftConfig, dtype: jnp.dtype | type) -> DraftModel:
    """A draft with shapes in place of weights; nothing is allocated."""
    return nnx.eval_shape(lambda: make_draft(config, dtype))


def abstract_draft(config: DraftConfig) -> Nested:
    """Shapes and dtypes of a draft's nested weights; nothing is allocated."""
    return params_of(nnx.eval_shape(lambda: make_draft(config, jnp.float32)))


def build_draft(config: DraftConfig, params: Nested, dtype: jnp.dtype | type) -> DraftModel:
    """A draft with the given nested weights, computing in `dtype`. May be traced."""
    return fill(lambda: make_draft(config, dtype), params)


def save_draft(directory: Path, config: DraftConfig, params: Nested) -> None:
    """Writes a checkpoint, replacing the one in `directory`; weights in `config.param_dtype`."""
    save_weights(directory / OWN_WEIGHTS, flatten(cast_like(params, abstract_draft(config))))
    save_json(directory / CONFIG_FILE, dataclasses.asdict(config))


def load_own_draft(directory: Path) -> tuple[DraftConfig, Nested]:
    """Sizes and nested weights of a checkpoint that `save_draft` wrote.

    Raises:
        UserError: No checkpoint there, a damaged one, or weights that do not fit its sizes.
    """
    config = config_from_json(read_json(directory / CONFIG_FILE))
    like = abstract_draft(config)
    flat = restore_weights(directory / OWN_WEIGHTS, flatten(like))
    return config, cast_like(unflatten(flat, like), like)


def config_from_json(values: Mapping[str, Any]) -> DraftConfig:
    """Sizes as `save_draft` writes them.

    Raises:
        UserError: An entry is missing, unknown, or of the wrong type.
    """
    tuples: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    try:
        for name, part in (("selector", SelectorConfig), ("markov", MarkovConfig)):
            if tuples.get(name) is not None:
                tuples[name] = part(**tuples[name])
        return DraftConfig(**tuples)
    except TypeError as error:
        raise UserError(f"{CONFIG_FILE} does not describe a draft: {error}") from error
