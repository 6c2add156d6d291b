"""The beginning of a descending order, without a sort.

XLA makes a library call of a large sort on a GPU, which is no part of the graph of a step: the host
waits for it. Where a beginning ends follows from sums alone. Its last key is looked for from the
highest bit, some bits a pass over the keys, each pass one reduction. Unrolled: a loop is no part of
a graph either.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

_BITS = 2
"""Found in a pass, which sums from three keys at once. More of them are slower on a CPU."""


@jax.jit  # one compilation where it is called by itself, also if that is often
def leading(
    keys: Int[Array, "R n"], weights: Float[Array, "R n"], budget: Float[Array, " R"]
) -> Bool[Array, "R n"]:
    """Of each row, what stands before its budget is reached; the largest key first.

    A place is in if the weights of those before it sum up to less than the budget: larger keys, and
    equal ones at lower places. Two rows, of whose equal keys the first one and no other is in:

        In:  keys [5, 7, 5, 9], weights 1, budget 3     Out: [True, True, False, True]
        In:  keys [5, 7, 5, 9], weights 1, budget 9     Out: [True, True, True, True]

    What is in is a beginning of the stable order whatever rounding does, and not empty. Which one
    is exact where sums are, as counts are up to 2**24 (weights 1). Other sums are rounded in
    another order than a running sum, so a place whose sum is the budget but for the last bits may
    be in by one and out by the other.

    Args:
        keys: int32, none of them -2**31.
        weights: float32, not negative. Equal keys have equal weights, or 0 from some place on; the
            largest key has a weight above 0.
        budget: float32, above 0.
    """
    order = keys.astype(jnp.uint32) ^ jnp.uint32(2**31)
    edge = jnp.zeros(keys.shape[0], jnp.uint32)  # the largest that has the budget from it up
    for low in reversed(range(0, 32, _BITS)):
        tried = [edge + jnp.uint32(step << low) for step in range(1, 2**_BITS)]
        reached = [mass >= budget for mass in _masses(order, weights, tried)]
        edge += sum(each.astype(jnp.uint32) for each in reached) << low
    tied = order == edge[:, None]
    above = jnp.where(order > edge[:, None], weights, 0.0).sum(axis=1)
    each = jnp.where(tied, weights, 0.0).max(axis=1)
    rank = jnp.cumsum(tied, axis=1, dtype=jnp.int32) - 1
    within = above[:, None] + rank.astype(jnp.float32) * each[:, None] < budget[:, None]
    return (order > edge[:, None]) | (tied & within)


def _masses(
    order: UInt32[Array, "R n"], weights: Float[Array, "R n"], tried: list[UInt32[Array, " R"]]
) -> tuple[Float[Array, " R"], ...]:
    """The weights from each of the `tried` keys up, in one pass over both arrays."""
    parts = tuple(jnp.where(order >= key[:, None], weights, 0.0) for key in tried)
    add = lambda one, other: tuple(a + b for a, b in zip(one, other, strict=True))
    return tuple(lax.reduce(parts, (jnp.float32(0.0),) * len(parts), add, (1,)))
