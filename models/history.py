"""What a model keeps its history in, from what its configuration says (`configs.formats`)."""

import dataclasses

from dhisparse_jax.configs.formats import COMPUTED
from dhisparse_jax.geometry import FP8, SCALED_KEYS, Geometry
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.models.hadamard import rotate_hadamard


def row_dtype(form: str, computed: str) -> str:
    """The dtype of rows that are kept in floats: that of the computation, or another."""
    return computed if form == COMPUTED else form


def key_dtype(form: str, computed: str) -> str:
    """The dtype of index keys."""
    return SCALED_KEYS if form == FP8 else row_dtype(form, computed)


def in_basis(index: IndexInputs, geometry: Geometry) -> IndexInputs:
    """Queries and keys in the basis that keys are kept in."""
    if geometry.index_format != FP8:
        return index
    return dataclasses.replace(
        index, queries=rotate_hadamard(index.queries), keys=rotate_hadamard(index.keys)
    )
