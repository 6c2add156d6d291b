"""Named inputs for `draft_attention`, for tests and benchmarks: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.draft_attention.types import KeysValues, RingSeen

UNSEEN = 1e3
"""Every key and value that no row sees: no sum that has one of them is near the right one."""


class Inputs(NamedTuple):
    """Arguments of `api.draft_attention`."""

    queries: Float[Array, "R T H dim"]
    ring: KeysValues
    own: KeysValues
    seen: RingSeen
    layer: int


def random(  # noqa: PLR0913  # one name per dimension
    *,
    committed: tuple[int, ...] = (150, 61),
    capacity: int = 72,
    window: int | None = 64,
    block: int = 8,
    heads: int = 8,
    kv: int = 2,
    dim: int = 16,
    causal: bool = False,
    magnitude: float = 1.0,
    dtype: str = "float32",
) -> Inputs:
    """Normal numbers in the second of two layers.

    Args:
        committed: positions that were written, of each request.
        capacity: C.
        window: positions that a row sees, its own included; None: all that the ring has.
        block: T.
        heads: H.
        kv: heads of keys and values.
        dim: numbers of a head.
        causal: whether rows see only earlier rows of their block.
        magnitude: factor of the queries: a large one makes the softmax pick single positions.
        dtype: of all numbers.
    """
    rng, requests = np.random.default_rng(0), len(committed)
    normal = lambda *shape: rng.normal(size=shape)
    given = lambda array: jnp.asarray(array, jnp.dtype(dtype))
    following, row = np.asarray(committed, np.int32), np.arange(block, dtype=np.int32)
    counts = np.repeat(np.minimum(following, capacity)[:, None], block, axis=1)
    if window is not None:
        counts = np.clip(window - 1 - row[None], 0, counts)
    ring = np.full((2, requests, 2, capacity, kv, dim), UNSEEN)
    for request, (end, most) in enumerate(zip(committed, counts.max(axis=1), strict=True)):
        seen = np.arange(end - most, end) % capacity
        ring[:, request, 1, seen] = normal(2, most, kv, dim)
    block_seen = row[:, None] >= row if causal else np.ones((block, block), np.bool_)
    return Inputs(
        queries=given(magnitude * normal(requests, block, heads, dim)),
        ring=KeysValues(given(ring[0]), given(ring[1])),
        own=KeysValues(*(given(normal(requests, block, kv, dim)) for _ in range(2))),
        seen=RingSeen(jnp.asarray(following), jnp.asarray(counts), jnp.asarray(block_seen)),
        layer=1,
    )


glm = partial(
    random,
    committed=(5000, 2056, 700),
    capacity=2056,
    window=2048,
    heads=16,
    kv=4,
    dim=64,
    dtype="bfloat16",
)
"""A quarter of the heads of GLM's drafts."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_dflash2": glm,
    "glm_dspark": partial(glm, block=7),
    "bfloat16": partial(random, dtype="bfloat16", dim=64),
    "float32": random,
    "one_request": partial(random, committed=(200,)),
    "one_row": partial(random, block=1),
    "sixteen_rows": partial(random, block=16, capacity=80, causal=True),
    "head_of_128": partial(random, dim=128),
    "ungrouped_heads": partial(random, kv=8),
    "odd_group": partial(random, heads=6, block=5),
    "odd_capacity": partial(random, capacity=67, window=None, committed=(66, 67, 68, 133)),
    "empty_ring": partial(random, committed=(0, 0)),
    "sees_little": partial(random, window=4, committed=(1, 2, 72, 73)),
    "sees_itself_alone": partial(random, window=1, causal=True),
    "smaller_than_a_block": partial(random, capacity=9, window=None, committed=(4, 9, 12)),
    "large_logits": partial(random, magnitude=40.0),
    "tiny_logits": partial(random, magnitude=1e-30),
}
