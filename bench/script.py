"""What requests select in the simulator, step by step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from bench.traces import Trace, verify_queries


class Script(NamedTuple):
    """What requests select: `windows[t, n]` are the selections of step n of trace t.

    Attributes:
        windows: int32 selected positions, NO_SLOT for none.
        history: int32 positions before the first step.
        advance: int32 tokens that a step accepts.
    """

    windows: Int[np.ndarray, "traces n T K"]
    history: Int[np.ndarray, " traces"]
    advance: Int[np.ndarray, "traces n"]


def script(traces: Sequence[Trace], queries: int = 1, advance: int = 1) -> Script:
    """Traces as a script, with the positions named in the order of their last selection.

    An admission keeps the newest positions, so that way it starts in steady state.
    """
    history = len(traces[0].stack)
    windows = []
    for sample in traces:
        name = np.empty(history + len(sample.selection), np.int32)
        name[sample.stack] = np.arange(history, dtype=np.int32)[::-1]
        name[history:] = np.arange(history, len(name))
        windows.append(verify_queries(name[sample.selection], queries, advance))
    stacked = np.stack(windows)
    return Script(
        stacked,
        history=np.full(len(traces), history, np.int32),
        advance=np.full(stacked.shape[:2], advance, np.int32),
    )
