"""Named inputs for `fp8_products`, for tests and benchmarks: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

E4M3 = jnp.dtype("float8_e4m3fn")
LARGEST = 448.0
"""Of e4m3."""


class Inputs(NamedTuple):
    """Arguments of `api.fp8_products`."""

    x: Float[np.ndarray, "E M K"]
    numbers: Float[np.ndarray, "E N K"]
    scale: Float[np.ndarray, "E N"]


def random(
    *, matrices: int = 2, rows: int = 16, depth: int = 256, channels: int = 128, dtype: str
) -> Inputs:
    """Normal rows and numbers, and scales that are all different."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape)
    return Inputs(
        x=draw(matrices, rows, depth).astype(jnp.dtype(dtype)),
        numbers=draw(matrices, channels, depth).astype(np.float32).astype(E4M3),
        scale=rng.uniform(0.5, 2.0, (matrices, channels)).astype(np.float32),
    )


glm = partial(random, dtype="bfloat16")
"""Rows as GLM-5.x's experts get them; the sizes set the load."""


def large_numbers() -> Inputs:
    """All numbers are the largest of the format, of either sign: sums are far beyond it."""
    inputs = glm()
    signs = np.where(np.asarray(inputs.numbers, np.float32) < 0, -LARGEST, LARGEST)
    return inputs._replace(numbers=signs.astype(E4M3))


def unlike_scales() -> Inputs:
    """Scales of 2**-60 to 2**60, the largest for the smallest channel: each belongs to its own."""
    inputs = glm()
    powers = np.linspace(-60, 60, inputs.scale.shape[1])
    return inputs._replace(scale=np.tile(np.exp2(powers), (2, 1)).astype(np.float32))


def empty_rows() -> Inputs:
    """Rows of an expert that no token picked are zero, whatever the numbers are."""
    inputs = large_numbers()
    x = inputs.x.copy()
    x[1], x[0, 3:] = 0, 0
    return inputs._replace(x=x)


CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": glm,
    "glm_verify": partial(glm, rows=64, depth=128),
    "glm_one_matrix": partial(glm, matrices=1, channels=64, depth=384),
    "glm_many_rows": partial(glm, rows=128, channels=64, depth=128),
    "large_numbers": large_numbers,
    "unlike_scales": unlike_scales,
    "empty_rows": empty_rows,
    "float32": partial(random, dtype="float32"),
    "odd_sizes": partial(random, matrices=3, rows=5, depth=37, channels=11, dtype="float32"),
    "one_row": partial(glm, rows=1),
}
