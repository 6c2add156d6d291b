"""Named inputs for `backup`, for tests and benchmarks: NumPy arrays, the same on every call.

Backup is retrieval with the two sides swapped, so its cases are those of `retrieve`, swapped.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from pallas_kernels.retrieve import cases as retrieve_cases


class Inputs(NamedTuple):
    """Arguments of `api.backup`."""

    host: Int[np.ndarray, "N W"]
    slots: Int[np.ndarray, "S W"]
    rows: Int[np.ndarray, " n"]
    sources: Int[np.ndarray, " n"]


def swapped(make: Callable[[], retrieve_cases.Inputs]) -> Inputs:
    """The copies of a retrieval in the other direction."""
    inputs = make()
    return Inputs(host=inputs.slots, slots=inputs.host, rows=inputs.targets, sources=inputs.rows)


def _case(make: Callable[[], retrieve_cases.Inputs]) -> Callable[[], Inputs]:
    return lambda: swapped(make)


CASES: dict[str, Callable[[], Inputs]] = {
    name: _case(make) for name, make in retrieve_cases.CASES.items()
}
