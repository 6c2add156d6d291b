"""Named inputs for `index_scores`, for tests and benchmarks: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.index_scores.types import ScaledKeys, quantise

HUGE = 1e38
"""Finite in float32 and bfloat16, infinite as soon as it is multiplied."""


class Inputs(NamedTuple):
    """Arguments of `api.index_scores`."""

    queries: Float[np.ndarray, "R T heads width"]
    weights: Float[np.ndarray, "R T heads"]
    keys: Float[np.ndarray, "R C width"] | ScaledKeys
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
    keys = np.array(inputs.keys)
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


def fp8(**sizes: Any) -> Inputs:  # noqa: ANN401  # those of `random`
    """GLM's indexer with fp8 keys, NaN where nothing is visible, and heads of very unlike size."""
    inputs = glm(**sizes)
    keys: Any = jax.tree.map(np.array, quantise(jnp.asarray(inputs.keys)))
    for request, seen in enumerate(inputs.visible.max(axis=1)):
        keys.numbers[request, seen:], keys.scales[request, seen:] = np.nan, np.nan
    sizes_of_heads = np.exp2(np.linspace(-60, 60, inputs.queries.shape[2]))[:, None]
    queries = (inputs.queries * sizes_of_heads).astype(inputs.queries.dtype)
    weights = inputs.weights / sizes_of_heads[:, 0].astype(np.float32)
    return inputs._replace(queries=queries, weights=weights, keys=keys)


def not_a_number() -> Inputs:
    """Keys at and beyond `visible` are NaN, in blocks that are visible in part and in others."""
    inputs = glm(positions=400, visible=(70, 0))
    keys = np.array(inputs.keys)
    keys[0, 70:], keys[1] = np.nan, np.nan
    return inputs._replace(keys=keys)


CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(glm, positions=256, visible=(256, 131)),
    "glm_verify": partial(glm, positions=256, visible=(250, 7), queries=4),
    "glm_lengths": partial(glm, requests=4, positions=328, visible=(0, 1, 328, 64)),
    "glm_odd_length": partial(glm, positions=203, queries=2, visible=(202, 130)),
    "glm_fp8": partial(fp8, positions=392, visible=(392, 129)),
    "glm_fp8_verify": partial(fp8, positions=256, visible=(250, 0), queries=6),
    "not_a_number": not_a_number,
    "float32": random,
    "odd_sizes": partial(random, heads=3, width=6, positions=37, queries=3, visible=(35, 1)),
    "one_position": partial(random, positions=1, visible=(1, 1)),
    "nothing_visible": partial(random, visible=(0, 96)),
    "poisoned_future": poisoned_future,
    "negative_weights": negative_weights,
    "unrelated": unrelated,
}
