"""How long a jitted operation takes: the median of many runs, with its spread.

One run dispatches a chain of calls that is compiled as one program, often enough that the run lasts
some milliseconds, and waits once at the end. So the launch of the program and the wait are spread
over many calls, and kernels of a few microseconds can be timed without a profiler. Compilation and
the first runs do not count.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import numpy as np

State = TypeVar("State")
Operands = TypeVar("Operands")
Result = TypeVar("Result")

RUNS = 20
LEAST_SECONDS = 5e-3
MOST_DISPATCHES = 500


class Timing(NamedTuple):
    """Time of one call in microseconds.

    Attributes:
        median: over the runs.
        low: first quartile.
        high: third quartile.
        runs: how many were timed.
        calls: calls in each run.
    """

    median: float
    low: float
    high: float
    runs: int
    calls: int


Step = Callable[[State, Operands, int], tuple[State, Result]]
"""`state, result = step(state, operands, call)`: call number `call` of a chain, a Python integer.

State is donated and handed from call to call. Operands are only read: a step picks those of its
call, so that no two calls are the same and the compiler can drop none. Every result is kept.
"""


Chain = Callable[[State, Operands], tuple[State, list[Result]]]
"""All calls of a chain: the state after them, and the result of each."""


def chain(step: Step[State, Operands, Result], calls: int) -> Chain[State, Operands, Result]:
    """`calls` calls of `step` as one jitted program, which donates the state."""

    def run(state: State, operands: Operands) -> tuple[State, list[Result]]:
        results = []
        for call in range(calls):
            state, result = step(state, operands, call)
            results.append(result)
        return state, results

    return jax.jit(run, donate_argnums=0)


def measure(
    step: Step[State, Operands, Result],
    state: State,
    operands: Operands,
    *,
    calls: int,
    runs: int = RUNS,
) -> tuple[Timing, State, list[Result]]:
    """Time of one call of `step` on the device.

    Args:
        step: see `Step`.
        state: state before the first call; consumed.
        operands: what the calls read.
        calls: how many calls make up the chain.
        runs: how many runs are timed.

    Returns:
        The timing, the last state, and the results of the last chain.
    """
    return measure_chain(chain(step, calls), state, operands, calls=calls, runs=runs)


def measure_chain(
    run: Chain[State, Operands, Result],
    state: State,
    operands: Operands,
    *,
    calls: int,
    runs: int = RUNS,
) -> tuple[Timing, State, list[Result]]:
    """What `measure` does, of a chain of `calls` calls that may be compiled already."""
    state, results = jax.block_until_ready(run(state, operands))
    once, state, results = _seconds(run, state, operands, 1)
    dispatches = max(1, min(MOST_DISPATCHES, math.ceil(LEAST_SECONDS / once)))
    samples = []
    for _ in range(runs):
        seconds, state, results = _seconds(run, state, operands, dispatches)
        samples.append(1e6 * seconds / (dispatches * calls))
    low, median, high = np.percentile(samples, (25, 50, 75))
    timing = Timing(float(median), float(low), float(high), runs, dispatches * calls)
    return timing, state, results


def _seconds(
    run: Chain[State, Operands, Result], state: State, operands: Operands, dispatches: int
) -> tuple[float, State, list[Result]]:
    """Wall time of so many dispatches, the state after them, and the last results."""
    results: list[Result] = []
    start = time.perf_counter()
    for _ in range(dispatches):
        state, results = run(state, operands)
    jax.block_until_ready((state, results))
    return time.perf_counter() - start, state, results
