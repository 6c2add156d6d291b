"""Named inputs for `retrieve`, for tests and benchmarks: NumPy arrays, the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Inputs(NamedTuple):
    """Arguments of `api.retrieve`."""

    host: Int[np.ndarray, "N W"]
    slots: Int[np.ndarray, "S W"]
    rows: Int[np.ndarray, " n"]
    targets: Int[np.ndarray, " n"]


def words(rng: np.random.Generator, *shape: int) -> Int[np.ndarray, "..."]:
    """Random words: any bit pattern, so NaNs and infinities of every float format among them."""
    return rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def random(
    *, records: int = 64, slots: int = 24, width: int = 32, fetches: int = 12, skipped: float = 0.3
) -> Inputs:
    """Random records to distinct random slots; a share of the entries is skipped.

    An entry is skipped by its row, its target, or both.
    """
    rng = np.random.default_rng(0)
    rows = rng.integers(0, records, fetches).astype(np.int32)
    targets = rng.permutation(slots)[:fetches].astype(np.int32)
    which = rng.integers(0, 3, fetches)
    skip = rng.random(fetches) < skipped
    rows[skip & (which != 1)] = -1
    targets[skip & (which != 0)] = -1
    return Inputs(words(rng, records, width), words(rng, slots, width), rows, targets)


def chosen(rows: list[int], targets: list[int]) -> Inputs:
    """The given copies among 64 records and 24 slots."""
    inputs = random()
    as_ids = lambda ids: np.array(ids, np.int32)
    return inputs._replace(rows=as_ids(rows), targets=as_ids(targets))


group = partial(random, width=672)
"""The record of a selection group of GLM-5.3 in fp8: 4 rows, 2,688 bytes."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(group, records=512, slots=160, fetches=128),
    "single_layer": partial(random, width=192, records=256, slots=96, fetches=64),
    "nothing_skipped": partial(random, skipped=0.0),
    "everything_skipped": partial(random, skipped=1.0),
    "every_slot": partial(random, fetches=24, skipped=0.0),
    "one": partial(random, fetches=1, skipped=0.0),
    "first_and_last": partial(chosen, [0, 63], [23, 0]),
    "one_record_twice": partial(chosen, [7, 7, -1, 7], [3, 4, 5, 6]),
    "skipped_row_names_a_slot": partial(chosen, [-1, 5], [9, -1]),
    "skipped_target_repeats": partial(chosen, [-1, 5, -1], [9, 9, 9]),
}
