"""Requests that come and go in a simulated hierarchy, so that a load is kept; and what that did.

A request runs 30 to `LIFE` steps; then another one takes its place, as in serving. When the load
falls, those with most left to do stay.
"""

from typing import NamedTuple

import jax
import numpy as np

from bench.simulator import Simulator, StepRecord

EVENT = 10
"""Steps between two moments at which requests come and go."""

LIFE = 150
"""Steps that a request runs at most."""


class Phase(NamedTuple):
    """A load that is kept for some steps."""

    name: str
    requests: int
    steps: int


class Run(NamedTuple):
    """A policy under a load: the steps, and what every admission did.

    Attributes:
        record: every step.
        release_steps: steps until each newcomer held its floor, in order of admission.
        admissions: when each came, and how many pages it took from others, likewise.
    """

    record: StepRecord
    release_steps: list[int]
    admissions: list[tuple[int, int]]

    def share(self, steps: slice) -> float:
        """Fetched share over some steps."""
        return float(self.record.fetched[steps].sum() / self.record.selected[steps].sum())

    def shares(self) -> np.ndarray:
        """Fetched share of every step."""
        fetched, selected = self.record.fetched, self.record.selected
        return np.asarray(fetched.sum(axis=(1, 2)) / selected.sum(axis=(1, 2)))

    def moved(self) -> np.ndarray:
        """Pages that the controller moved in every step; one that changes hands counts once."""
        return np.maximum(self.record.moved, self.record.taken)

    def moves_per_token(self) -> np.ndarray:
        """The same per generated token."""
        return self.moved() / self.record.emitted.sum(axis=1)

    def all_moves_per_token(self, period: int) -> np.ndarray:
        """Moves of the controller and of admissions per token, over every `period` steps."""
        moved = self.moved().astype(np.int64)
        for step, pages in self.admissions:
            moved[step] += pages
        by_period = lambda steps: steps.reshape(-1, period).sum(axis=1)
        return by_period(moved) / by_period(self.record.emitted.sum(axis=1))

    def pages(self, steps: slice) -> list[float]:
        """Pages that a request holds on average in each of its pools."""
        held, active = self.record.held[steps].sum(axis=2), self.record.active[steps].sum(axis=1)
        return [float(mean) for mean in (held / active[:, None]).mean(axis=0)]


class Crowd:
    """Keeps as many requests running as a phase says; every other one follows the same traces.

    Args:
        sim: where they run; its script has two traces per pool, of the even requests first.
        seed: of how long they run.
    """

    def __init__(self, sim: Simulator, seed: int = 0) -> None:
        self._sim, self._rng, self._joined = sim, np.random.default_rng(seed), 0
        self._left: dict[int, int] = {}  # row -> steps to go
        self._steps = 0
        self._release_steps: list[int] = []
        self._admissions: list[tuple[int, int]] = []

    def run(self, phases: tuple[Phase, ...]) -> Run:
        """Play some phases; a policy runs as many requests as it has rows."""
        parts = []
        for phase in phases:
            for _ in range(phase.steps // EVENT):
                joined = self._events(min(phase.requests, self._sim.cfg.requests))
                record = self._sim.run(EVENT)
                self._release_steps += [self._steps_to_floor(record, row) for row in joined]
                parts.append(record)
                self._steps += EVENT
                self._left = {row: left - EVENT for row, left in self._left.items()}
        record = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        return Run(record, self._release_steps, self._admissions)

    def _events(self, load: int) -> list[int]:
        """Let requests go and come; returns the rows of those that came."""
        ended = [row for row, left in self._left.items() if left <= 0]
        staying = sorted(set(self._left) - set(ended), key=self._left.__getitem__, reverse=True)
        for row in ended + staying[load:]:
            self._sim.leave(row)
            del self._left[row]
        return [self._join() for _ in range(load - len(self._left))]

    def _join(self) -> int:
        pools, before = self._sim.cfg.pools, self._sim.budget
        first = self._joined % 2 * pools
        row = self._sim.join(range(first, first + pools))
        taken = int(np.maximum(before - self._sim.budget, 0).sum())
        self._admissions.append((self._steps, taken))
        self._left[row] = EVENT * int(self._rng.integers(3, LIFE // EVENT + 1))
        self._joined += 1
        return row

    def _steps_to_floor(self, record: StepRecord, row: int) -> int:
        """Steps that a newcomer made with less than its floor; all of them if it never got it."""
        held = (record.held[:, :, row] >= self._sim.cfg.floor_pages(0)).all(axis=1)
        return int(np.argmax(held)) if held.any() else len(held)
