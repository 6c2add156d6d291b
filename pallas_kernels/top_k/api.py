"""Exact top-K selection."""

from jaxtyping import Array, Float, Int

from pallas_kernels.top_k import reference


def top_k(scores: Float[Array, "R T C"], k: int) -> Int[Array, "R T K"]:
    """Positions of the `k` largest scores of each query, ties to the lowest position.

    Args:
        scores: float32 without NaN; -inf marks positions that may not be selected. 0.0 equals -0.0.
        k: how many positions to select, at most C.

    Returns:
        int32 positions by descending score; NO_SLOT fills up where fewer than `k` are selectable.
    """
    return reference.top_k(scores, k)
