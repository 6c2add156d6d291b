"""Named inputs for `index_scores`, for tests and benchmarks: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

HUGE = 1e38
"""Finite in float32 and bfloat16, infinite as soon as it is multiplied."""


class Inputs(NamedTuple):
    """Arguments of `api.index_scores`."""

    queries: Float[np.ndarray, "R T heads width"]
    weights: Float[np.ndarray, "R T heads"]
    keys: Float[np.ndarray, "R C width"]
    visible: Int[np.ndarray, "R T"]


def random(
    *,
    requests: int = 2,
    queries: int = 1,
    positions: int = 96,
    heads: int = 4,
    width: int = 16,
    dtype: str = "float32",
    visible: tuple[int, ...] = (96, 41),
) -> Inputs:
    """Normal queries, weights and keys; `visible` is the count of each request's first query.

    Query t of a request sees t more positions than the first, as verify queries do.
    """
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))
    seen = np.array(visible, np.int32)[:, None] + np.arange(queries, dtype=np.int32)
    return Inputs(
        queries=draw(requests, queries, heads, width),
        weights=rng.normal(size=(requests, queries, heads)).astype(np.float32),
        keys=draw(requests, positions, width),
        visible=seen,
    )


def poisoned_future() -> Inputs:
    """Keys at and beyond `visible` overflow when they are multiplied."""
    inputs = random(visible=(40, 0))
    keys = inputs.keys.copy()
    keys[0, 40:], keys[1] = HUGE, -HUGE
    return inputs._replace(keys=keys)


def negative_weights() -> Inputs:
    """Every score is negative or a zero of either sign: a hidden position must not score 0."""
    inputs = random(visible=(90, 17))
    return inputs._replace(weights=-np.abs(inputs.weights))


def unrelated() -> Inputs:
    """No key has a positive product with any query: every visible score is exactly zero."""
    inputs = random()
    return inputs._replace(queries=np.abs(inputs.queries), keys=-np.abs(inputs.keys))


glm = partial(random, heads=32, width=128, dtype="bfloat16")
"""The indexer of GLM-5.x; `positions`, `requests` and `visible` set the load."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(glm, positions=256, visible=(256, 131)),
    "glm_verify": partial(glm, positions=256, visible=(250, 7), queries=4),
    "float32": random,
    "odd_sizes": partial(random, heads=3, width=6, positions=37, queries=3, visible=(35, 1)),
    "one_position": partial(random, positions=1, visible=(1, 1)),
    "nothing_visible": partial(random, visible=(0, 96)),
    "poisoned_future": poisoned_future,
    "negative_weights": negative_weights,
    "unrelated": unrelated,
}
