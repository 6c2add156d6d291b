"""Top-K by a plain sort of (score, position) pairs."""

import numpy as np


def best(scores, k):
    """Positions of the best of one query, ascending; -1 fills up."""
    selectable = [position for position, score in enumerate(scores) if score > -np.inf]
    # -0.0 == 0.0 in Python too, so the two zeros tie here.
    selectable.sort(key=lambda position: (-scores[position], position))
    return (sorted(selectable[:k]) + [-1] * k)[:k]


def expected(scores, k):
    return [[best(query.tolist(), k) for query in request] for request in scores]


def adversarial(rng, size):
    """Scores that tie, cluster, lie next to each other, span all magnitudes, or are hidden."""
    one = rng.normal(size=size).astype(np.float32)
    kind = rng.integers(0, 6)
    if kind == 1:  # relu: most are exactly zero
        return np.maximum(one - 1, 0).astype(np.float32)
    if kind == 2:  # the best are neighbours
        return one + 10 * (abs(np.arange(size) - rng.integers(0, size)) < 12).astype(np.float32)
    if kind == 3:  # one bit apart
        return (rng.integers(0, 40, size) + 0x3F800000).astype(np.int32).view(np.float32)
    if kind == 4:  # any bit pattern that is a number, infinities too
        bits = rng.integers(-(2**31), 2**31, size).astype(np.int32).view(np.float32)
        return np.where(np.isnan(bits), np.float32(-np.inf), bits)
    if kind == 5:
        return np.where(rng.random(size) < 0.8, np.float32(-np.inf), one)
    return one
