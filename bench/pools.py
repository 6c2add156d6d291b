"""Large host pools of random records, for benchmarks that read or write them.

A word is a hash of its place, so that a record can be checked without keeping a second copy. As
numbers of any row format its parts are finite, so that attention over them can be checked too.
Pinning memory takes about a second per GB, so pools are kept while the sizes stay the same.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Pools = tuple[Array, ...]


FINITE = 0xBFBFBFBF
"""Without the highest exponent bit of float32, bfloat16 and float8 (e4m3) numbers: below 2."""


def record_words(
    rows: Int[Array, " n"], words: int, pool: int | Int[Array, ""]
) -> Int[Array, "n words"]:
    """The content of records `rows` of pool number `pool`: a hash of row, word and pool.

    The mixing steps are those of MurmurHash3's 32-bit finaliser; then one bit per byte is cleared.
    """
    row = rows.astype(jnp.uint32)[:, None] * jnp.uint32(0x9E3779B1)
    word = jnp.arange(words, dtype=jnp.uint32)[None] * jnp.uint32(0x85EBCA77)
    mixed = row ^ word ^ jnp.uint32(pool) * jnp.uint32(0x27D4EB2F)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(multiplier)
    return ((mixed ^ (mixed >> 16)) & jnp.uint32(FINITE)).view(jnp.int32)


class PoolCache:
    """The pools of the last sizes that were asked for. They are lent: `take`, then `give`."""

    def __init__(self) -> None:
        self._pools: Pools = ()
        self._original = False

    def take(self, count: int, records: int, words: int, *, original: bool = True) -> Pools:
        """`count` pools of `records` records.

        Args:
            count: number of pools.
            records: records of each.
            words: int32 words of a record.
            original: whether the content must be that of `record_words`.
        """
        sizes = [(records, words)] * count
        usable = self._original or not original
        pools, self._pools = self._pools, ()
        if [pool.shape for pool in pools] != sizes or not usable:
            del pools  # before the next are allocated: both may not fit
            pools = tuple(_filled(records, words, pool) for pool in range(count))
        return pools

    def give(self, pools: Pools, *, original: bool = True) -> None:
        """Hand pools back; `original` says that nothing was written to them."""
        self._pools, self._original = pools, original


POOLS = PoolCache()


def _filled(records: int, words: int, pool: int) -> Int[Array, "N W"]:
    return jax.block_until_ready(_fill(records, words, jnp.int32(pool)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(records: int, words: int, pool: Int[Array, ""]) -> Int[Array, "N W"]:
    """Filled on the device, which is faster, and moved to the host.

    `out_shardings` would put the result there too, but leave it typed as device memory.
    """
    content = record_words(jnp.arange(records, dtype=jnp.int32), words, pool)
    return jax.device_put(content, jax.memory.Space.Host)
