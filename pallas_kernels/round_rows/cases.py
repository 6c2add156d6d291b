"""Named rows for `round_rows`, for tests: the same on every call."""

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
from jaxtyping import Float


def random(*shape: int, spread: float = 1.0, dtype: str = "bfloat16") -> Float[np.ndarray, "*n w"]:
    """Normal numbers, each row on a scale of its own."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=shape) * spread ** generator.normal(size=(*shape[:-1], 1))
    return rows.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def with_zeros() -> Float[np.ndarray, "n w"]:
    """A row of zeros, and one of a single number."""
    rows = random(3, 64)
    rows[1] = 0
    rows[2, 1:] = 0
    return rows


CASES: dict[str, Callable[[], Float[np.ndarray, "*n w"]]] = {
    "residual": partial(random, 2, 8, 6144),
    "values": partial(random, 3, 1, 16384),
    "odd_width": partial(random, 5, 100),
    "of_experts": partial(random, 4, 16, 2048),
    "many_sizes": partial(random, 33, 512, spread=1e4),
    "float32": partial(random, 7, 256, dtype="float32"),
    "one_number": partial(random, 4, 1),
    "with_zeros": with_zeros,
}
