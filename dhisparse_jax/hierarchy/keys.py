"""Index keys in host memory: packed like records, padded to whole units of them."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.formats import AnyKeys, StoredKeys, key_shapes
from pallas_kernels.common.record_layout import RecordLayout, as_records, as_words
from pallas_kernels.common.rows import WORD_BYTES, pack, unpack


def packed_keys(keys: AnyKeys, records: RecordLayout) -> Int[Array, "n *Wk"]:
    """Stored keys as rows of `host_keys`; scales, if any, after the numbers."""
    rows = lambda leaf: pack(leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])))
    words = jnp.concatenate([rows(leaf) for leaf in jax.tree.leaves(keys)], axis=1)
    return as_records(words, records)


def unpacked_keys(cfg: HierarchyConfig, rows: Int[Array, "n *Wk"]) -> StoredKeys:
    """The reverse of `packed_keys`."""
    rows = as_words(rows, cfg.record_layout)
    leaves, structure = jax.tree.flatten(key_shapes(cfg.geometry, rows.shape[0]))
    found: list[Array] = []
    column = 0
    for leaf in leaves:
        end = column + math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // WORD_BYTES
        found.append(unpack(rows[:, column:end], leaf.dtype).reshape(leaf.shape))
        column = end
    return jax.tree.unflatten(structure, found)
