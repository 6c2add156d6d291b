"""What the simulator replays: a recording as it happened, the same with another draft, or traces.

A recording has what every verify query selected, and how many tokens were accepted. So whatever the
policy and the budget, the same requests come and go with the same selections: under those of the
recorded run, exactly its fetches follow. Another draft length changes the steps. Then only what the
accepted tokens selected is known; `with_draft` deals it out anew, to T queries a step.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from bench.script import Script, script
from bench.simulator import Simulator, StepRecord
from bench.traces import trace
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.recording import Admit, Join, Leave, Recording, Step
from pallas_kernels.common.ids import NO_SLOT


class Enter(NamedTuple):
    """A request takes a free row and follows a trace in every pool."""

    row: int
    traces: tuple[int, ...]


class Steps(NamedTuple):
    """So many decode steps."""

    count: int


Event = Enter | Admit | Leave | Steps


class Play(NamedTuple):
    """Who comes and goes, in order, and what they select.

    Attributes:
        script: the traces; request n of a recording follows n * pools, n * pools + 1, ...
        events: what happens.
    """

    script: Script
    events: tuple[Event, ...]


@dataclasses.dataclass
class _Told:
    """A request of a recording: its prompt, and its steps.

    Attributes:
        length: positions of its prompt.
        windows: selections [pools, T, K] of every step.
        accepted: tokens of every step.
    """

    length: int
    windows: list[Int[np.ndarray, "pools T K"]] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)


def replay(cfg: HierarchyConfig, play: Play) -> StepRecord:
    """What a hierarchy does in a play, step by step; `cfg` has as many queries as its windows."""
    sim = Simulator(cfg, play.script)
    parts: list[StepRecord] = []
    for event in play.events:
        match event:
            case Enter(row, traces):
                sim.enter(row, traces)
            case Admit(row, pool):
                sim.admit(row, pool)
            case Leave(row):
                sim.leave(row)
            case Steps(count):
                parts.append(sim.run(count))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def as_recorded(recording: Recording) -> Play:
    """Everything as it happened."""
    told: list[_Told] = []
    here: dict[int, _Told] = {}
    events: list[Event] = []
    for event in recording.events:
        match event:
            case Join(row, length):
                events.append(Enter(row, _traces(len(told), recording.cfg.pools)))
                told.append(_Told(length))
                here[row] = told[-1]
            case Step(rows, accepted, selection):
                for place, row in enumerate(rows.tolist()):
                    here[row].windows.append(selection[:, place])
                    here[row].accepted.append(int(accepted[place]))
                if events and isinstance(events[-1], Steps):
                    events[-1] = Steps(events[-1].count + 1)
                else:
                    events.append(Steps(1))
            case _:
                events.append(event)
    shape = (recording.cfg.pools, recording.cfg.queries, recording.cfg.geometry.top_k)
    return Play(_script(told, shape), tuple(events))


def with_draft(play: Play, pools: int, queries: int, accept: int) -> Play:
    """The same requests in the same rows with `queries` a step, `accept` of them accepted.

    The queries beyond the accepted ones select what their successors selected, as those of a draft
    that was right would have; a real one's would be wrong, and another selection. In a row,
    requests follow each other without a pause.

    Args:
        play: a recording as it happened.
        pools: pools of its hierarchy.
        queries: T, a draft length and one.
        accept: tokens per step, 1..T.
    """
    script = play.script
    told: list[_Told] = []
    for first in range(0, len(script.history), pools):
        accepted = script.advance[first]
        lines = [
            np.concatenate([window[:count] for window, count in zip(each, accepted, strict=True)])
            for each in script.windows[first : first + pools]
        ]
        told.append(_dealt(int(script.history[first]), np.stack(lines), queries, accept))
    rows: dict[int, list[int]] = defaultdict(list)
    for event in play.events:
        if isinstance(event, Enter) and told[event.traces[0] // pools].windows:
            rows[event.row].append(event.traces[0] // pools)
    shape = (pools, queries, script.windows.shape[-1])
    return Play(_script(told, shape), _row_by_row(rows, [len(x.windows) for x in told], pools))


def calibrated(
    k: int, history: int, steps: int, requests: int, queries: int, accept: int
) -> tuple[Play, int]:
    """Requests with the published locality, all from the first step on; and the capacity they need.

    Args:
        k: selected positions per query.
        history: positions of every prompt.
        steps: decode steps.
        requests: how many.
        queries: T per step.
        accept: tokens that a step accepts.
    """
    tokens = (steps - 1) * accept + queries
    traces = [trace(k=k, history=history, steps=tokens, seed=seed) for seed in range(requests)]
    enter: list[Event] = [
        event for row in range(requests) for event in (Enter(row, (row,)), Admit(row, 0))
    ]
    return Play(script(traces, queries, accept), (*enter, Steps(steps))), history + tokens + accept


def _dealt(length: int, line: Int[np.ndarray, "pools L K"], queries: int, accept: int) -> _Told:
    """A request whose tokens selected `line`, with other steps."""
    told, tokens = _Told(length), line.shape[1]
    for start in range(0, tokens, accept):
        window = line[:, start : start + queries]
        missing = queries - window.shape[1]
        fill = ((0, 0), (0, missing), (0, 0))
        told.windows.append(np.pad(window, fill, constant_values=NO_SLOT))
        told.accepted.append(min(accept, tokens - start))
    return told


def _row_by_row(rows: dict[int, list[int]], steps: Sequence[int], pools: int) -> tuple[Event, ...]:
    """Events in which the requests of each row follow each other."""
    events: list[Event] = []
    left: dict[int, int] = {}
    waiting = {row: list(numbers) for row, numbers in sorted(rows.items())}
    while left or any(waiting.values()):
        for row, numbers in waiting.items():
            if row not in left and numbers:
                number = numbers.pop(0)
                events.append(Enter(row, _traces(number, pools)))
                events += [Admit(row, pool) for pool in range(pools)]
                left[row] = steps[number]
        count = min(left.values())
        events.append(Steps(count))
        left = {row: more - count for row, more in left.items()}
        events += [Leave(row) for row, more in left.items() if more == 0]
        left = {row: more for row, more in left.items() if more}
    return tuple(events)


def _traces(number: int, pools: int) -> tuple[int, ...]:
    """The traces of request `number`."""
    return tuple(range(number * pools, (number + 1) * pools))


def _script(told: Sequence[_Told], shape: tuple[int, int, int]) -> Script:
    """A script with a trace per request and pool; `shape` is that of a step's selections."""
    pools, queries, k = shape
    steps = max(len(each.windows) for each in told)
    windows = np.full((len(told), steps, pools, queries, k), NO_SLOT, np.int32)
    advance = np.zeros((len(told), steps), np.int32)
    for number, each in enumerate(told):
        if each.windows:
            windows[number, : len(each.windows)] = each.windows
            advance[number, : len(each.accepted)] = each.accepted
    return Script(
        windows=windows.swapaxes(1, 2).reshape(-1, steps, queries, k),
        history=np.repeat(np.array([each.length for each in told], np.int32), pools),
        advance=np.repeat(advance, pools, axis=0),
    )
