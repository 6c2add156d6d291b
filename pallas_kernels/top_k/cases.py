"""Named inputs for `top_k`, for tests and benchmarks: NumPy arrays, the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Inputs(NamedTuple):
    """Arguments of `api.top_k`."""

    scores: Float[np.ndarray, "R T C"]
    k: int


def random(
    *,
    requests: int = 2,
    queries: int = 1,
    positions: int = 96,
    k: int = 8,
    visible: tuple[int, ...] = (96, 41),
) -> Inputs:
    """Normal scores; request r sees its first `visible[r]` positions."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(requests, queries, positions)).astype(np.float32)
    hidden = np.arange(positions) >= np.array(visible)[:, None, None]
    return Inputs(np.where(hidden, np.float32(-np.inf), scores), k)


def few_values(*values: float, positions: int = 96, k: int = 8) -> Inputs:
    """Scores out of a handful of values: the K-th place is always decided by a tie."""
    rng = np.random.default_rng(0)
    scores = rng.choice(np.array(values, np.float32), size=(3, 2, positions))
    return Inputs(scores, k)


def sorted_scores(*, ascending: bool) -> Inputs:
    """Monotone scores: every new position enters the best K, or none after the first K does."""
    scores = np.arange(96, dtype=np.float32)
    return Inputs(np.tile(scores if ascending else scores[::-1], (2, 1, 1)), 8)


glm = partial(random, positions=4096, k=2048, visible=(4096, 3000))
"""K of GLM-5.x; `positions`, `requests` and `visible` set the load."""

INFINITY = float("inf")

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": glm,
    "verify": partial(random, queries=4, positions=256, k=32, visible=(256, 100)),
    "all_equal": partial(few_values, 1.0),
    "ties": partial(few_values, -1.0, 2.0, 3.0),
    "signed_zeros": partial(few_values, 0.0, -0.0),
    "zeros_and_one": partial(few_values, 0.0, -0.0, 1.0, k=40),
    "one_bit_apart": partial(few_values, 1.0, float(np.nextafter(np.float32(1), np.float32(2)))),
    "extremes": partial(few_values, 3e38, -3e38, 1e-30, -1e-30, k=60),
    "holes": partial(few_values, 1.0, -INFINITY),
    "fewer_visible": partial(random, visible=(3, 8)),
    "one_less_than_k": partial(random, visible=(7, 9)),
    "nothing_visible": partial(random, visible=(0, 96)),
    "all_of_them": partial(random, k=96, visible=(96, 95)),
    "best_of_one": partial(random, positions=1, k=1, visible=(1, 0)),
    "single_best": partial(random, k=1),
    "ascending": partial(sorted_scores, ascending=True),
    "descending": partial(sorted_scores, ascending=False),
}
