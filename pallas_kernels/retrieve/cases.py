"""Named inputs for `retrieve`, for tests and benchmarks: the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Int

from pallas_kernels.retrieve.types import Fetches, Moves


class Inputs(NamedTuple):
    """Arguments of `api.retrieve`."""

    host: Int[np.ndarray, "N W"]
    slots: Int[np.ndarray, "S W"]
    fetches: Fetches
    moves: Moves | None


def words(rng: np.random.Generator, *shape: int) -> Int[np.ndarray, "..."]:
    """Random words: any bit pattern, so NaNs and infinities of every float format among them."""
    return rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def skip_some(rng: np.random.Generator, share: float, *lists: Int[np.ndarray, "*n"]) -> None:
    """Skip a share of the entries: by the first list, by the second, or by both."""
    first, second = lists
    which = rng.integers(0, 3, first.shape)
    skip = rng.random(first.shape) < share
    first[skip & (which != 1)] = -1
    second[skip & (which != 0)] = -1


def random(
    *,
    requests: int = 3,
    records: int = 20,
    slots: int = 40,
    width: int = 32,
    entries: int = 12,
    counts: tuple[int, ...] | None = None,
    skipped: float = 0.3,
    moves: int = 0,
) -> Inputs:
    """Random records to distinct random slots; moves go from slots that are no targets.

    Args:
        requests: R.
        records: of the host pool, for each request.
        slots: S.
        width: words of a record.
        entries: fetches in the list of each request.
        counts: how many of them count; all by default. The others name slots of their own.
        skipped: share of the entries that do nothing.
        moves: slots that are moved.
    """
    rng = np.random.default_rng(0)
    order = rng.permutation(slots).astype(np.int32)
    fetched, moved = requests * entries, requests * entries + moves
    rows = rng.integers(0, requests * records, (requests, entries)).astype(np.int32)
    targets = order[:fetched].reshape(requests, entries)
    skip_some(rng, skipped, rows, targets)
    ends = np.array(counts or (entries,) * requests, np.int32)
    return Inputs(
        host=words(rng, requests * records, width),
        slots=words(rng, slots, width),
        fetches=_fetches(rows, targets, ends),
        moves=_moves(order[moved : moved + moves], order[fetched:moved]) if moves else None,
    )


def _fetches(*lists: npt.ArrayLike) -> Fetches:
    return Fetches(*(jnp.asarray(ids, jnp.int32) for ids in lists))


def _moves(*lists: npt.ArrayLike) -> Moves:
    return Moves(*(jnp.asarray(ids, jnp.int32) for ids in lists))


def chosen(
    rows: list[int],
    targets: list[int],
    moves: tuple[list[int], list[int]] | None = None,
    counts: int | None = None,
) -> Inputs:
    """The given copies by the second of three requests, of 60 records, among 40 slots."""
    empty = [-1] * len(rows)
    fetches = _fetches(
        [empty, rows, empty],
        [empty, targets, empty],
        [0, len(rows) if counts is None else counts, 0],
    )
    return random()._replace(fetches=fetches, moves=_moves(*moves) if moves else None)


glm = partial(random, width=672)
"""The record of a selection group of GLM-5.3 in fp8: 4 rows, 2,688 bytes."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(
        glm, requests=4, records=128, slots=180, entries=40, counts=(40, 1, 0, 33), moves=8
    ),
    "single_layer": partial(random, width=192, records=64, slots=96, entries=30, moves=3),
    "fp8_row": partial(random, width=164, counts=(12, 5, 9)),
    "odd_words": partial(random, width=21, slots=60, moves=4),
    "one_word": partial(random, width=1),
    "nothing_skipped": partial(random, skipped=0.0),
    "everything_skipped": partial(random, skipped=1.0),
    "every_slot": partial(random, slots=36, skipped=0.0),
    "one": partial(random, requests=1, entries=1, skipped=0.0),
    "one_of_many": partial(random, requests=9, records=3, slots=90, entries=9, counts=(1,) * 9),
    "only_the_last_request": partial(random, counts=(0, 0, 12)),
    "no_counts": partial(random, counts=(0, 0, 0)),
    "counts_beyond_the_lists": partial(random, counts=(13, 99, 2**31 - 1)),
    "no_entries": partial(random, entries=0),
    "moves": partial(random, slots=80, moves=17),
    "only_moves": partial(random, entries=0, moves=5),
    "no_moves": partial(chosen, [4], [5], ([], [])),
    "skipped_moves": partial(chosen, [4], [5], ([7, -1, 9, -1], [-1, 6, 8, -1])),
    "first_and_last": partial(chosen, [0, 59], [39, 0]),
    "one_record_twice": partial(chosen, [7, 7, -1, 7], [3, 4, 5, 6]),
    "one_copy_twice": partial(chosen, [7, 7], [3, 3], ([8, 8], [4, 4])),
    "skipped_row_names_a_slot": partial(chosen, [-1, 5], [9, -1]),
    "skipped_target_repeats": partial(chosen, [-1, 5, -1], [9, 9, 9]),
    "uncounted_entries_name_slots": partial(chosen, [1, 2, 3], [4, 5, 6], counts=1),
    "rows_out_of_range": partial(chosen, [-2, 60, 2**31 - 1, -(2**31), 3], [1, 2, 3, 4, 5]),
    "targets_out_of_range": partial(chosen, [1, 2, 3, 4, 5], [40, -2, 2**31 - 1, -(2**31), 6]),
    "moves_out_of_range": partial(
        chosen, [1], [2], ([40, -2, 2**31 - 1, 5, 5, 6], [11, 12, 13, 40, -2, 14])
    ),
}
