"""Named inputs for `backup`, for tests and benchmarks: NumPy arrays, the same on every call."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from pallas_kernels.retrieve.cases import skip_some, words


class Inputs(NamedTuple):
    """Arguments of `api.backup`; pool p is written from `slots[slots_of[p]]`."""

    hosts: tuple[Int[np.ndarray, "_ _"], ...]
    slots: tuple[Int[np.ndarray, "_ _"], ...]
    rows: Int[np.ndarray, " n"]
    sources: Int[np.ndarray, "pools n"]
    slots_of: tuple[int, ...]


def random(
    *,
    slots_of: tuple[int, ...] = (0, 0, 0),
    widths: tuple[int, ...] = (32,),
    records: int = 40,
    slots: int = 64,
    entries: int = 24,
    skipped: float = 0.3,
) -> Inputs:
    """Random slots to distinct random rows; a share of the entries is skipped.

    Args:
        slots_of: which slot array each pool is written from.
        widths: words of a record in each slot array.
        records: of each pool.
        slots: in each array.
        entries: n.
        skipped: share of the entries that do nothing.
    """
    rng = np.random.default_rng(0)
    rows = rng.permutation(records)[:entries].astype(np.int32)
    sources = rng.integers(0, slots, (len(slots_of), entries)).astype(np.int32)
    skip_some(rng, skipped, rows, sources[0])
    sources[1:][rng.random(sources[1:].shape) < skipped] = -1
    return Inputs(
        hosts=tuple(words(rng, records, widths[array]) for array in slots_of),
        slots=tuple(words(rng, slots, width) for width in widths),
        rows=rows,
        sources=sources,
        slots_of=slots_of,
    )


def chosen(rows: list[int], *sources: list[int]) -> Inputs:
    """The given copies, to pools with 40 records among 64 slots."""
    inputs = random(slots_of=(0,) * len(sources))
    return inputs._replace(rows=np.array(rows, np.int32), sources=np.array(sources, np.int32))


def shorter() -> Inputs:
    """The second pool has fewer records than the lists name."""
    inputs = random(skipped=0.0)
    first, second, third = inputs.hosts
    return inputs._replace(hosts=(first, second[:17], third))


glm = partial(random, widths=(192, 672), slots_of=(0, 0, *(1,) * 19))
"""The pools of GLM-5.3 in fp8: two of one layer, 19 of four."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(glm, entries=16),
    "one_pool": partial(random, slots_of=(0,), entries=33),
    "fp8_rows": partial(random, widths=(164,)),
    "odd_words": partial(random, widths=(21,)),
    "sizes_take_turns": partial(random, widths=(96, 32, 7), slots_of=(1, 0, 2, 1, 0)),
    "slots_of_their_own": partial(random, widths=(32, 32, 32), slots_of=(2, 1, 0)),
    "nothing_skipped": partial(random, skipped=0.0),
    "everything_skipped": partial(random, skipped=1.0),
    "every_row": partial(random, entries=40, skipped=0.0),
    "one": partial(random, entries=1, skipped=0.0),
    "no_entries": partial(random, entries=0),
    "first_and_last": partial(chosen, [0, 39], [63, 0], [0, 63]),
    "one_slot_twice": partial(chosen, [3, 4, 5, 6], [7, 7, -1, 7]),
    "one_copy_twice": partial(chosen, [3, 3], [7, 7]),
    "skipped_row_has_a_source": partial(chosen, [-1, 5], [9, 8]),
    "skipped_source_repeats_a_row": partial(chosen, [9, 9, 9], [-1, 5, -1], [6, -1, -1]),
    "rows_out_of_range": partial(chosen, [40, -2, 2**31 - 1, -(2**31), 6], [1, 2, 3, 4, 5]),
    "sources_out_of_range": partial(chosen, [1, 2, 3, 4, 5], [-2, 64, 2**31 - 1, -(2**31), 3]),
    "pools_of_different_lengths": shorter,
}
