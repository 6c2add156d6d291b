"""Index keys in host memory: packed like records, padded to whole units of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.state import PoolState
from pallas_kernels.common.rows import pack, unpack, words_of


def packed_keys(pool: PoolState, keys: Float[Array, "n index"]) -> Int[Array, "n Wk"]:
    """Index keys of any float dtype as the rows of `host_keys`."""
    words = pack(keys.astype(pool.index_keys.dtype))
    room = pool.host_keys.shape[1] - words.shape[1]
    return jnp.pad(words, ((0, 0), (0, room)))


def unpacked_keys(cfg: HierarchyConfig, rows: Int[Array, "n Wk"]) -> Float[Array, "n index"]:
    """The reverse of `packed_keys`."""
    geometry = cfg.geometry
    words = rows[:, : words_of(geometry.index_width, geometry.index_dtype)]
    return unpack(words, geometry.index_dtype)
