"""Rows and index keys in the formats that they are stored in: quantised once, when they are new.

Whoever stores a row or a key does it here, so prefill and decode store the same bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.geometry import PACKED_KEYS, SCALED_KEYS, Geometry, RowFormat
from pallas_kernels.common.rows import pack
from pallas_kernels.common.scaled_rows import ScaledRow, encode
from pallas_kernels.index_scores.types import ScaledKeys, packed_format, quantise

StoredKeys = Float[Array, "*n index"] | ScaledKeys | Int[Array, "*n words"]
"""Index keys as they are stored."""

AnyKeys = StoredKeys | tuple[()]
"""Index keys of a history, as they are stored; nothing if it has none."""


def stored_rows(row: RowFormat, values: Shaped[Array, "*n width"]) -> Int[Array, "*n words"]:
    """Rows as words."""
    if isinstance(row.dtype, ScaledRow):
        return encode(values, row.dtype)
    return pack(values.astype(row.dtype))


def stored_keys(geometry: Geometry, keys: Float[Array, "*n index"]) -> StoredKeys:
    """Index keys in the format of a geometry."""
    if geometry.index_dtype == SCALED_KEYS:
        return quantise(keys, power_scales=geometry.index_power_scales)
    if geometry.index_dtype == PACKED_KEYS:
        return encode(keys, packed_format(geometry.index_width))
    return keys.astype(geometry.index_dtype)


def key_shapes(geometry: Geometry, *shape: int) -> Any:  # noqa: ANN401  # shapes in place of arrays
    """Shapes and dtypes of the arrays that hold so many stored keys."""
    if not geometry.index_width:
        return ()
    exact = jax.ShapeDtypeStruct((*shape, geometry.index_width), jnp.float32)
    return jax.eval_shape(lambda keys: stored_keys(geometry, keys), exact)


def no_keys(geometry: Geometry, *shape: int) -> AnyKeys:
    """Room for so many stored keys, all zeros."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), key_shapes(geometry, *shape)
    )
