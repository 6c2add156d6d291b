"""How long a jitted operation takes: the median of many runs, with its spread.

One run dispatches a chain of calls that is compiled as one program, often enough that the run lasts
some milliseconds, and waits once at the end. So the launch of the program and the wait are spread
over many calls, and kernels of a few microseconds can be timed without a profiler. Compilation and
the first runs do not count.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

State = TypeVar("State")
"""What a step changes."""

Operands = TypeVar("Operands")
"""What it only reads."""

Result = TypeVar("Result")
"""What it gives beside its state."""

RUNS = 20
"""Timed runs, whose median and quartiles are the result."""

LEAST_SECONDS = 2e-2
"""What a run takes at least: it has as many dispatches as that needs."""

MOST_DISPATCHES = 500
"""Most dispatches of a run."""


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


def chain(
    step: Step[State, Operands, Result], calls: int, **options: str | int
) -> Chain[State, Operands, Result]:
    """`calls` calls of `step` as one jitted program, which donates the state; compiler options."""

    def run(state: State, operands: Operands) -> tuple[State, list[Result]]:
        results = []
        for call in range(calls):
            state, result = step(state, operands, call)
            results.append(result)
        return state, results

    return jax.jit(run, donate_argnums=0, compiler_options=options or None)


def measure(
    step: Step[State, Operands, Result],
    state: State,
    operands: Operands,
    *,
    calls: int,
    runs: int = RUNS,
    anew: bool = False,
) -> tuple[Timing, State, list[Result]]:
    """Time of one call of `step` on the device.

    Args:
        step: see `Step`.
        state: state before the first call; consumed.
        operands: what the calls read.
        calls: how many calls make up the chain.
        runs: how many runs are timed.
        anew: every chain starts from `state`, not from where the last one ended.

    Returns:
        The timing, the last state, and the results of the last chain.
    """
    run = chain(step, calls)
    return measure_chain(run, state, operands, calls=calls, runs=runs, anew=anew)


def measure_chain(
    run: Chain[State, Operands, Result],
    state: State,
    operands: Operands,
    *,
    calls: int,
    runs: int = RUNS,
    anew: bool = False,
) -> tuple[Timing, State, list[Result]]:
    """What `measure` does, of a chain of `calls` calls that may be compiled already."""
    dispatch = partial(_seconds, run, operands=operands, anew=anew)
    start = lambda last: state if anew else last
    _, last, _ = dispatch(state, 1)
    once, last, results = dispatch(start(last), 1)
    dispatches = max(1, min(MOST_DISPATCHES, math.ceil(LEAST_SECONDS / once)))
    samples = []
    for _ in range(runs):
        seconds, last, results = dispatch(start(last), dispatches)
        samples.append(1e6 * seconds / (dispatches * calls))
    low, median, high = np.percentile(samples, (25, 50, 75))
    timing = Timing(float(median), float(low), float(high), runs, dispatches * calls)
    return timing, last, results


def _seconds(
    run: Chain[State, Operands, Result],
    state: State,
    dispatches: int,
    *,
    operands: Operands,
    anew: bool,
) -> tuple[float, State, list[Result]]:
    """Wall time of so many dispatches, the state after them, and the last results.

    Where all start from `state` its copies are made before the clock starts.
    """
    copies = [jax.tree.map(jnp.copy, state) for _ in range(dispatches * anew)]
    jax.block_until_ready(copies)
    results: list[Result] = []
    begin = time.perf_counter()
    for dispatch in range(dispatches):
        state, results = run(copies[dispatch] if anew else state, operands)
    jax.block_until_ready((state, results))
    return time.perf_counter() - begin, state, results
