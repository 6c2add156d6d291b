"""Where n-grams of a text are looked up: rows of a table, from the ids of their tokens.

An n-gram is hashed to the exclusive or of id_k * multiplier_k over its tokens, k = 0 for the last
one; every head of the order n takes the remainder by a prime of its own. Source: DeepSeek-V4.1,
and Cheng et al. (2026), "Conditional Memory via Scalable Lookup".

The products have 64 bits, of which JAX has none by default: they are kept as bytes here.
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from dhisparse_jax.models.glm.norms import along_last

SEED = 10_007
"""Times the number of the layer, it seeds the multipliers."""

_BYTES = 8


def multipliers_of(layer: int, order: int, vocabulary: int) -> tuple[int, ...]:
    """Odd multipliers of a layer, one for every token of an n-gram, from the last one backwards.

    Args:
        layer: number of the layer.
        order: tokens of the longest n-gram.
        vocabulary: ids that tokens can have: no product exceeds 63 bits.
    """
    bound = max(1, np.iinfo(np.int64).max // vocabulary // 2)
    drawn = np.random.default_rng(SEED * layer).integers(0, bound, size=order, dtype=np.int64)
    return tuple(2 * int(number) + 1 for number in drawn)


def table_rows(
    ids: Int[Array, "*n order"], multipliers: tuple[int, ...], primes: tuple[int, ...]
) -> Int[Array, "*n columns"]:
    """Rows of a table that the n-grams which end with some token are looked up in.

    Args:
        ids: int32 ids of the token and of those before it, the newest first.
        multipliers: see `multipliers_of`.
        primes: how many rows each head hits, by n-gram; their rows follow each other in the table.

    Returns:
        int32 rows, in the order of `primes`: those of 2 tokens, then those of 3, and so on.
    """
    heads = len(primes) // (len(multipliers) - 1)
    firsts = [0, *itertools.accumulate(primes)]
    mixed = _times(ids[..., 0], multipliers[0])
    found: list[Array] = []
    for back in range(1, len(multipliers)):
        product = _times(ids[..., back], multipliers[back])
        mixed = [one ^ other for one, other in zip(mixed, product, strict=True)]
        mine = slice((back - 1) * heads, back * heads)
        rest = _remainders(mixed, primes[mine])
        found.append(rest.astype(jnp.int32) + _row(firsts[mine], jnp.int32, rest.ndim))
    return jnp.concatenate(found, axis=-1)


def _times(ids: Int[Array, "*n"], multiplier: int) -> list[UInt32[Array, "*n"]]:
    """Products as bytes, the lowest first."""
    carry = jnp.zeros(ids.shape, jnp.uint32)
    product: list[UInt32[Array, "*n"]] = []
    for byte in multiplier.to_bytes(_BYTES, "little"):
        carry = carry + ids.astype(jnp.uint32) * jnp.uint32(byte)
        product.append(carry & jnp.uint32(255))
        carry = carry >> jnp.uint32(8)
    return product


def _remainders(
    number: list[UInt32[Array, "*n"]], primes: tuple[int, ...]
) -> UInt32[Array, "*n heads"]:
    """Of a number in bytes; primes of 24 bits leave room for the next byte."""
    by = _row(primes, jnp.uint32, number[0].ndim + 1)
    rest = jnp.zeros((*number[0].shape, len(primes)), jnp.uint32)
    for byte in reversed(number):
        rest = ((rest << jnp.uint32(8)) | byte[..., None]) % by
    return rest


def _row(values: tuple[int, ...] | list[int], dtype: type, ndim: int) -> Array:
    """Constants along the last axis."""
    return along_last(jnp.asarray(values, dtype), ndim)
