"""Named inputs for `sparse_attention`, for tests and benchmarks: the same on every call.

Words that no selected row covers are NaN in every float format.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.common.scaled_rows import GLM_FP8, V4_ENTRY, ScaledRow, decode, encode

NAN_WORD = -1
"""All bits set: NaN in float32, and two NaNs in bfloat16."""

RECORD_WORDS_MULTIPLE = 32


class Inputs(NamedTuple):
    """Arguments of `api.sparse_attention`, and the rows behind `slots` for the oracle."""

    query: Float[np.ndarray, "R T H width"]
    slots: Int[np.ndarray, "S W"]
    location: Int[np.ndarray, "R T K"]
    sinks: Float[np.ndarray, " H"] | None
    offset: int
    row_format: str | ScaledRow
    value_width: int
    scale: float
    rows: Float[np.ndarray, "S width"]


def random(  # noqa: PLR0913  # one name per dimension
    *,
    requests: int = 2,
    queries: int = 1,
    heads: int = 4,
    width: int = 12,
    value_width: int = 8,
    top_k: int = 10,
    slots: int = 48,
    selected: tuple[int, ...] = (10, 7),
    layer: int = 0,
    dtype: str = "float32",
    magnitude: float = 1.0,
    scaled: ScaledRow | None = None,
    sinks: bool = False,
) -> Inputs:
    """Normal queries and rows; request r selects `selected[r]` random slots, in random places.

    Args:
        requests: R.
        queries: T.
        heads: H.
        width: numbers in a row.
        value_width: leading numbers that are the value.
        top_k: K.
        slots: S.
        selected: how many of the K entries of each request are not masked.
        layer: the rows are those of this layer of a record; the other words are NaN.
        dtype: of query and rows.
        magnitude: factor of the queries: a large one makes the softmax pick single rows.
        scaled: format of the rows, if they have scales.
        sinks: whether heads have sinks, from far below the logits to far above.
    """
    rng = np.random.default_rng(0)
    query = magnitude * rng.normal(size=(requests, queries, heads, width))
    location = np.full((requests, queries, top_k), -1, np.int32)
    for request, count in enumerate(selected):
        for t in range(queries):
            place = rng.permutation(top_k)[:count]
            location[request, t, place] = rng.permutation(slots)[:count]
    rows = rng.normal(size=(slots, width)).astype(jnp.dtype(dtype))
    unread = ~np.isin(np.arange(slots), location)
    if scaled is None:
        words = np.ascontiguousarray(rows).view(np.int32)
    else:
        words = np.asarray(encode(jnp.asarray(rows), scaled))
        rows = np.asarray(decode(jnp.asarray(words), scaled))
    records, offset = _records(words, layer, unread)
    return Inputs(
        query=query.astype(jnp.dtype(dtype)),
        slots=records,
        location=location,
        sinks=np.linspace(-8.0, 8.0, heads, dtype=np.float32) if sinks else None,
        offset=offset,
        row_format=dtype if scaled is None else scaled,
        value_width=value_width,
        scale=width**-0.5,
        rows=rows,
    )


def _records(
    rows: Int[np.ndarray, "S words"], layer: int, unread: np.ndarray
) -> tuple[Int[np.ndarray, "S W"], int]:
    """Padded records that hold `rows` as layer `layer`, and the word at which they start."""
    offset = layer * rows.shape[1]
    used = offset + rows.shape[1]
    padded = -(-(used + 1) // RECORD_WORDS_MULTIPLE) * RECORD_WORDS_MULTIPLE
    records = np.full((len(rows), padded), NAN_WORD, np.int32)
    records[:, offset:used] = rows
    records[unread] = NAN_WORD
    return records, offset


def same_slot() -> Inputs:
    """One slot selected again and again: its value comes out unchanged."""
    inputs = random(selected=(10, 10))
    location = np.broadcast_to(inputs.location[..., :1], inputs.location.shape).copy()
    return inputs._replace(location=location)


def slot_zero_masked() -> Inputs:
    """Slot 0 is poison and nobody selects it: masked entries must not read it either."""
    inputs = random(selected=(4, 0))
    free = inputs.location != 0
    slots = inputs.slots.copy()
    slots[0] = NAN_WORD
    return inputs._replace(slots=slots, location=np.where(free, inputs.location, -1))


glm = partial(random, width=576, value_width=512, dtype="bfloat16")
"""The rows of GLM-5.x; `heads`, `top_k`, `requests`, `slots` and `selected` set the load."""

fp8 = partial(glm, scaled=GLM_FP8)
"""The same in 656 bytes."""

v4 = partial(
    random, width=512, value_width=512, dtype="bfloat16", heads=64, scaled=V4_ENTRY, sinks=True
)
"""Entries of DeepSeek-V4: the whole row is the value, and heads have sinks."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(glm, heads=8, top_k=64, slots=256, selected=(64, 50)),
    "glm_verify": partial(glm, heads=8, top_k=64, slots=256, selected=(64, 9), queries=4, layer=3),
    "glm_float32": partial(glm, top_k=64, slots=128, selected=(64, 50), dtype="float32"),
    "glm_fp8": partial(fp8, heads=8, top_k=64, slots=256, selected=(64, 50)),
    "glm_fp8_verify": partial(
        fp8, heads=64, top_k=150, slots=400, selected=(150, 9), queries=4, layer=3
    ),
    "v4": partial(v4, top_k=64, slots=256, selected=(64, 50)),
    "v4_verify": partial(v4, top_k=192, slots=400, selected=(192, 0), queries=3),
    "sinks": partial(random, sinks=True, selected=(10, 0)),
    "glm_sinks": partial(
        glm, heads=64, top_k=1100, slots=1500, selected=(1100, 3, 0), requests=3, sinks=True
    ),
    "float32": random,
    "bfloat16": partial(random, dtype="bfloat16"),
    "second_layer": partial(random, layer=1),
    "fourth_layer_bfloat16": partial(random, layer=3, dtype="bfloat16"),
    "verify": partial(random, queries=3),
    "all_masked": partial(random, selected=(0, 0)),
    "one_masked_request": partial(random, selected=(10, 0), queries=2),
    "single_row": partial(random, selected=(1, 1)),
    "best_of_one": partial(random, top_k=1, selected=(1, 0)),
    "same_slot": same_slot,
    "slot_zero_masked": slot_zero_masked,
    "large_logits": partial(random, magnitude=1e4),
    "huge_logits": partial(random, magnitude=1e30),
    "tiny_logits": partial(random, magnitude=1e-30),
    "value_is_row": partial(random, value_width=12),
    "odd_sizes": partial(
        random, heads=3, width=10, value_width=3, top_k=7, slots=13, selected=(7, 5)
    ),
}
