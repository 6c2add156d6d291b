"""Selecting without sorting, in registers: what the kernels of `top_k` and `plan` share.

Rank among integers is found by bisection of their range: halve it until the K-th is alone.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Floor of the mean; the sum may not fit into 32 bits."""
    return (low & high) + ((low ^ high) >> 1)


def ranks(
    sure: Bool[Array, " n"],
    wanted: Bool[Array, " n"],
    ties: Int[Array, ""],
    before: tuple[jax.Array | int, jax.Array | int],
) -> tuple[Bool[Array, " n"], Int[Array, " n"], tuple[jax.Array, jax.Array]]:
    """Take what is sure, and of what else is wanted the first `ties`; number them in order.

    One scan counts both: sure ones in the high half of a word, the others in the low one. So a
    block has at most 2**15 - 1 of either.

    Args:
        sure: which are taken in any case; a subset of `wanted`.
        wanted: which are taken while they last.
        ties: how many of those that are not sure are taken, over all blocks.
        before: sure ones and others in earlier blocks.

    Returns:
        Which are taken, their numbers over all blocks, and `before` for the next block.
    """
    one = jnp.where(sure, 1 << 16, jnp.where(wanted, 1, 0)).astype(jnp.int32)
    ahead, total = jnp.cumsum(one, dtype=jnp.int32) - one, jnp.sum(one)
    tied = (ahead & 0xFFFF) + before[1]
    take = sure | (wanted & (tied < ties))
    number = (ahead >> 16) + before[0] + jnp.minimum(tied, ties)
    return take, number, (before[0] + (total >> 16), before[1] + (total & 0xFFFF))


def taken(before: tuple[jax.Array, jax.Array], ties: Int[Array, ""]) -> Int[Array, ""]:
    """How many `ranks` has taken of the blocks so far."""
    return before[0] + jnp.minimum(before[1], ties)
