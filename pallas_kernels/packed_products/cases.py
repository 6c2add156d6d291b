"""Named inputs for `packed_products`, for tests and benchmarks: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

BLOCK = 32


class Inputs(NamedTuple):
    """Arguments of `api.packed_products`."""

    x: Float[np.ndarray, "E M K"]
    numbers: UInt8[np.ndarray, "E N half"]
    scales: Shaped[np.ndarray, "E N blocks"]
    counts: Int[np.ndarray, " E"]


def random(
    *,
    matrices: int = 2,
    rows: int = 16,
    depth: int = 256,
    channels: int = 128,
    counts: tuple[int, ...] | None = None,
    powers: tuple[int, int] = (-8, 3),
    dtype: str = "bfloat16",
) -> Inputs:
    """Normal rows, any numbers, and scales between two powers of two."""
    rng = np.random.default_rng(0)
    scales = np.ldexp(1.0, rng.integers(*powers, (matrices, channels, depth // BLOCK)))
    return Inputs(
        x=rng.normal(size=(matrices, rows, depth)).astype(jnp.dtype(dtype)),
        numbers=rng.integers(0, 256, (matrices, channels, depth // 2), np.uint8),
        scales=scales.astype(ml_dtypes.float8_e8m0fnu),
        counts=np.asarray(counts or (rows,) * matrices, np.int32),
    )


def every_number() -> Inputs:
    """Rows that pick one input each, so that every byte shows what it stands for."""
    inputs = random(rows=64, powers=(0, 1))
    x = np.zeros(inputs.x.shape, np.float32)
    x[:, np.arange(64), 2 * np.arange(64)] = 1.0
    numbers = np.broadcast_to(np.arange(256, dtype=np.uint8)[:128, None], (2, 128, 128)).copy()
    numbers[1] += 128
    return inputs._replace(x=x.astype(inputs.x.dtype), numbers=numbers)


CASES: dict[str, Callable[[], Inputs]] = {
    "small": random,
    "two_blocks_of_rows": partial(random, rows=96, counts=(96, 65)),
    "few_of_many_rows": partial(random, rows=96, counts=(1, 17)),
    "no_rows": partial(random, counts=(0, 16)),
    "odd_rows": partial(random, rows=40, counts=(40, 3)),
    "unlike_scales": partial(random, powers=(-60, 60)),
    "every_number": every_number,
    "float32": partial(random, dtype="float32"),
    "odd_sizes": partial(random, matrices=3, rows=5, depth=96, channels=11, dtype="float32"),
}
