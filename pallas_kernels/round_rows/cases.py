"""Named rows for `round_rows`, for tests: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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


class Gated(NamedTuple):
    """Arguments of `api.round_gated`."""

    sums: Float[np.ndarray, "E M twice"]
    rows: Float[np.ndarray, "E M"]
    columns: Float[np.ndarray, "E twice"]

    def exact(self) -> Float[np.ndarray, "E M width"]:
        """What is to be rounded."""
        sums, rows, columns = (each.astype(np.float64) for each in self)
        gate, up = np.split(sums * rows[..., None] * columns[:, None], 2, axis=-1)
        with np.errstate(over="ignore"):  # of a gate that lets nothing through
            return gate / (1.0 + np.exp(-gate)) * up


def gated(matrices: int, rows: int, width: int, dtype: str = "bfloat16") -> Gated:
    """Normal sums, and scales that differ from row to row and from channel to channel."""
    generator = np.random.default_rng(1)
    scales = lambda *shape: np.exp(generator.normal(size=shape)).astype(np.float32)
    sums = random(matrices, rows, 2 * width, dtype=dtype)
    return Gated(sums, scales(matrices, rows), scales(matrices, 2 * width))


GATED: dict[str, Callable[[], Gated]] = {
    "of_experts": partial(gated, 4, 16, 2048),
    "of_one": partial(gated, 1, 5, 512),
    "odd_width": partial(gated, 3, 7, 100),
    "float32": partial(gated, 2, 3, 64, dtype="float32"),
}


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
