"""Named logits for `sinkhorn`, for tests: the same on every call."""

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float

STEPS, EPSILON = 20, 1e-6
"""Of DeepSeek-V4."""


def random(*shape: int, spread: float = 1.0) -> Float[np.ndarray, "*n size size"]:
    """Normal logits."""
    return (spread * np.random.default_rng(0).normal(size=shape)).astype(np.float32)


CASES: dict[str, Callable[[], Float[np.ndarray, "*n size size"]]] = {
    "streams": partial(random, 4, 6, 4, 4),
    "one_matrix": partial(random, 1, 4, 4),
    "more_than_a_warp": partial(random, 67, 4, 4),
    "far_apart": partial(random, 5, 4, 4, spread=30.0),
    "two_rows": partial(random, 9, 2, 2),
    "all_equal": lambda: np.zeros((3, 4, 4), np.float32),
}
