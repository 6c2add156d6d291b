"""Index keys in host memory: packed like records, padded to whole units of them."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.hierarchy.state import PoolState
from pallas_kernels.common.rows import pack, unpack, words_of


def packed_keys(pool: PoolState, keys: Float[Array, "n index"]) -> Int[Array, "n Wk"]:
    """Index keys of one pool, in the dtypes that it stores, as rows of `host_keys`."""
    rows = lambda leaf: pack(leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])))
    words = jnp.concatenate([rows(leaf) for leaf in jax.tree.leaves(keys)], axis=1)
    room = pool.host_keys.shape[1] - words.shape[1]
    return jnp.pad(words, ((0, 0), (0, room)))


def unpacked_keys(pool: PoolState, rows: Int[Array, "n Wk"]) -> Float[Array, "n index"]:
    """The reverse of `packed_keys`."""
    every, structure = jax.tree.flatten(pool.index_keys)
    leaves: list[Array] = []
    start = 0
    for leaf in every:  # requests, positions, numbers of a key
        end = start + words_of(math.prod(leaf.shape[2:]), leaf.dtype)
        values = unpack(rows[:, start:end], leaf.dtype)
        leaves.append(values.reshape(rows.shape[0], *leaf.shape[2:]))
        start = end
    return jax.tree.unflatten(structure, leaves)
