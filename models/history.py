"""What a model keeps its history in, from what its configuration says (`configs.formats`)."""

import dataclasses
from typing import TypeVar

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.formats import COMPUTED
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.geometry import FP4, FP8, PACKED_KEYS, SCALED_KEYS, Geometry
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.models.hadamard import rotate_hadamard

Config = TypeVar("Config", bound=GlmConfig | V4Config | V41Config)


def with_formats(config: Config, rows: str | None, keys: str | None) -> Config:
    """A configuration with other formats of history; None: those that it has.

    Raises:
        UserError: there is no such format, or it is not possible with the sizes of the model.
    """
    return dataclasses.replace(
        config,
        kv_format=rows or config.kv_format,
        index_format=keys or config.index_format,
    )


def row_dtype(form: str, computed: str) -> str:
    """The dtype of rows that are kept in floats: that of the computation, or another."""
    return computed if form == COMPUTED else form


def key_dtype(form: str, computed: str) -> str:
    """The dtype of index keys."""
    return {FP8: SCALED_KEYS, FP4: PACKED_KEYS}.get(form) or row_dtype(form, computed)


def in_basis(index: IndexInputs, geometry: Geometry) -> IndexInputs:
    """Queries and keys in the basis that keys are kept in."""
    if geometry.index_format not in (FP8, FP4):
        return index
    assert index.keys is not None  # of models that select once per group
    return dataclasses.replace(
        index, queries=rotate_hadamard(index.queries), keys=rotate_hadamard(index.keys)
    )
