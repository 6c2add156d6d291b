"""The load step: what `fixed` and `adaptive` fetch while the load goes up and down again.

Simulated exactly (`bench.simulate`) on the calibrated GLM trace at K = 2048 and 100K context. Every
request has two pools; one selects anew a quarter of what the published curve says, one 1.75 times
as much: their mean is the published curve. Both policies have the same device memory, enough for
`ROWS` requests with 2 K per pool under `fixed`. `adaptive` may give each no less than K, so it
takes in twice as many. Requests end after some time and others take their place, as in serving.

When the load falls, the request with most left to do stays. It fills its new pages with what it
misses, so its share falls slowly; the load settles when the next one, whose prompt fills its pages,
takes its place.

The moves of a step are those of the controller: pages that it gives or takes. An admission moves
others, at most an even share, once; the largest is `admission_pages_max`.
`oscillation` is a load that changes every 10 steps. Shares are fetched / selected rows. The exit
status is 1 if a bar is missed.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.record import RESULTS, environment, write
from bench.simulate import Script, Simulator, StepRecord, geometry, script
from bench.traces import GLM_5_1, trace
from dhisparse_jax.config import HierarchyConfig, Policy

ROWS = 16
"""Requests that `fixed` holds."""

LOCALITIES = (0.25, 1.75)
"""Misses of the pools of a request, in units of the published ones."""

COMPARED = ("fixed", "adaptive")

EVENT = 10
"""Steps between two moments at which requests come and go."""

LIFE = 150
"""Steps that a request runs at most."""

SETTLED_SHARE = 0.014
SETTLED_STEPS = 200
RELEASE_STEPS = 2
FLOOR_MARGIN = 1.10


class Phase(NamedTuple):
    """A load that is kept for some steps."""

    name: str
    requests: int
    steps: int


PHASES = (
    Phase("low", 1, 60),
    Phase("half", ROWS // 2, 60),
    Phase("high", ROWS, 100),
    Phase("exhausted", 2 * ROWS, 80),
    Phase("low again", 1, 300),
)
OSCILLATION = tuple(Phase("oscillation", ROWS // 2 * (1 + n % 2), EVENT) for n in range(12))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is simulated."""

    k: int = 2048
    history: int = 100_000
    moves_per_step: int = 32

    def config(self, policy: Policy, rows: int, hot_rows: int) -> HierarchyConfig:
        """A hierarchy of this size."""
        return HierarchyConfig(
            geometry=geometry(self.k, len(LOCALITIES)),
            policy=policy,
            requests=rows,
            capacity=self.history + LIFE + EVENT,
            hot_rows=hot_rows,
            moves_per_step=self.moves_per_step,
        )

    def script(self) -> Script:
        """Two traces per kind of pool, the kinds one after the other."""
        kinds = [
            GLM_5_1.with_misses(factor * (1 - GLM_5_1.shares[0]))
            for factor in (*LOCALITIES, *LOCALITIES)
        ]
        return script(
            [
                trace(kind, k=self.k, history=self.history, steps=LIFE + EVENT, seed=seed)
                for seed, kind in enumerate(kinds)
            ]
        )


class Run(NamedTuple):
    """A policy under a load: the steps, and what every admission did.

    Attributes:
        record: every step.
        release_steps: steps until each newcomer held its floor.
        admission_pages: pages that each admission took from others.
    """

    record: StepRecord
    release_steps: list[int]
    admission_pages: list[int]

    def share(self, steps: slice) -> float:
        """Fetched share over some steps."""
        return float(self.record.fetched[steps].sum() / self.record.selected[steps].sum())

    def shares(self) -> np.ndarray:
        """Fetched share of every step."""
        return np.asarray(self.record.fetched.sum(axis=1) / self.record.selected.sum(axis=1))

    def moves_per_token(self) -> np.ndarray:
        """Pages moved per generated token, every step; a page that changes hands counts once."""
        moved = np.maximum(self.record.moved, self.record.taken)
        return moved / self.record.active.sum(axis=1)


class Crowd:
    """Requests that come and go so that as many run as a phase says."""

    def __init__(self, sim: Simulator, seed: int = 0) -> None:
        self._sim, self._rng, self._joined = sim, np.random.default_rng(seed), 0
        self._left: dict[int, int] = {}  # row -> steps to go
        self.release_steps: list[int] = []
        self.admission_pages: list[int] = []

    def run(self, phases: tuple[Phase, ...]) -> Run:
        """Play some phases; a policy runs as many requests as it has rows."""
        parts = []
        for phase in phases:
            for _ in range(phase.steps // EVENT):
                self._events(min(phase.requests, self._sim.cfg.requests))
                parts.append(self._sim.run(EVENT))
                self._left = {row: left - EVENT for row, left in self._left.items()}
        record = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        return Run(record, self.release_steps, self.admission_pages)

    def _events(self, load: int) -> None:
        ended = [row for row, left in self._left.items() if left <= 0]
        staying = sorted(set(self._left) - set(ended), key=self._left.__getitem__, reverse=True)
        for row in ended + staying[load:]:
            self._sim.leave(row)
            del self._left[row]
        while len(self._left) < load:
            self._join()

    def _join(self) -> None:
        before, number = self._sim.budget, self._joined % 2
        row = self._sim.join(tuple(number * len(LOCALITIES) + pool for pool in range(len(before))))
        after, floor = self._sim.budget, self._sim.cfg.floor_pages
        self.admission_pages.append(int(np.maximum(before - after, 0).sum()))
        # Pages are a newcomer's before its first step; if not, the bound below is missed.
        self.release_steps.append(0 if (after[:, row] >= floor).all() else LIFE)
        self._left[row] = EVENT * int(self._rng.integers(3, LIFE // EVENT + 1))
        self._joined += 1


def steps_of(name: str, settling: int = 0) -> slice:
    """The steps of a phase without its first ones."""
    start = 0
    for phase in PHASES:
        if phase.name == name:
            return slice(start + settling, start + phase.steps)
        start += phase.steps
    raise KeyError(name)


def settle_steps(run: Run, width: int = EVENT) -> int:
    """Steps after the fall of the load until the share stays at its bar, `width` steps averaged."""
    shares = run.shares()[steps_of("low again")].reshape(-1, width).mean(axis=1)
    above = np.flatnonzero(shares > SETTLED_SHARE)
    return int(width * (above.max(initial=-1) + 1))


def summarise(fixed: Run, adaptive: Run, floor: Run, swinging: Run, bound: float) -> dict[str, Any]:
    """The figures of the load step."""
    high, low = steps_of("high", 40), steps_of("low again", SETTLED_STEPS)
    moves = max(adaptive.moves_per_token().max(), swinging.moves_per_token().max())
    return {
        "fixed_low": fixed.share(low),
        "fixed_high": fixed.share(high),
        "adaptive_low": adaptive.share(low),
        "adaptive_high": adaptive.share(high),
        "adaptive_exhausted": adaptive.share(steps_of("exhausted", 20)),
        "fixed_at_floor": floor.share(slice(20, None)),
        "release_steps_max": max(adaptive.release_steps + swinging.release_steps),
        "settle_steps": settle_steps(adaptive),
        "moves_per_token_max": float(moves),
        "moves_bound": bound,
    }


def bars(summary: dict[str, Any], shares: dict[str, tuple[float, ...]]) -> dict[str, bool]:
    """What must hold; `shares` are those of `fixed` and `adaptive` by phase."""
    return {
        "fixed at low load 13-15 %": 0.13 <= summary["fixed_low"] <= 0.15,
        "fixed at high load 13-15 %": 0.13 <= summary["fixed_high"] <= 0.15,
        "adaptive at low load <= 1.4 %": summary["adaptive_low"] <= SETTLED_SHARE,
        "adaptive below fixed": all(mine < other for other, mine in shares.values()),
        "exhausted within 10 % of fixed at the floor": summary["adaptive_exhausted"]
        <= FLOOR_MARGIN * summary["fixed_at_floor"],
        "released within 2 steps": summary["release_steps_max"] <= RELEASE_STEPS,
        "settled within 200 steps": summary["settle_steps"] <= SETTLED_STEPS,
        "moves within the bound": summary["moves_per_token_max"] <= summary["moves_bound"],
    }


def series(run: Run) -> dict[str, list[Any]]:
    """A run step by step."""
    return {
        "requests": run.record.active.sum(axis=1).tolist(),
        "fetched_share": [round(float(share), 5) for share in run.shares()],
        "held_pages": run.record.held.sum(axis=(1, 2)).tolist(),
        "moved_pages": np.maximum(run.record.moved, run.record.taken).tolist(),
    }


def simulate(sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """All runs, and what they say."""
    play = sizes.script()
    runs: dict[str, Run] = {}
    cases = {
        "fixed": (Policy.FIXED, ROWS, 2 * sizes.k, PHASES),
        "adaptive": (Policy.ADAPTIVE, 2 * ROWS, sizes.k, PHASES),
        "fixed_at_floor": (Policy.FIXED, 2 * ROWS, sizes.k, (Phase("floor", 2 * ROWS, 60),)),
        "oscillation": (Policy.ADAPTIVE, 2 * ROWS, sizes.k, OSCILLATION),
    }
    for name, (policy, rows, hot_rows, phases) in cases.items():
        start = time.perf_counter()
        sim = Simulator(sizes.config(policy, rows, hot_rows), play)
        runs[name] = Crowd(sim).run(phases)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    summary = summarise(*runs.values(), bound=float(sizes.moves_per_step))
    phases = {
        phase.name: tuple(runs[name].share(steps_of(phase.name, 40)) for name in COMPARED)
        for phase in PHASES
        if phase.requests <= ROWS
    }
    return {
        "sizes": {**dataclasses.asdict(sizes), "rows": ROWS, "localities": LOCALITIES},
        "phases": [phase._asdict() for phase in PHASES],
        "summary": summary,
        "bars": bars(summary, phases),
        "shares": {name: dict(zip(COMPARED, pair, strict=True)) for name, pair in phases.items()},
        "admission_pages_max": max(
            runs["adaptive"].admission_pages + runs["oscillation"].admission_pages
        ),
        "series": {name: series(run) for name, run in runs.items()},
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = (
        RESULTS / "load_step.json"
    ),
) -> None:
    """Simulate the load step and check its bars."""
    console, start = Console(stderr=True), time.perf_counter()
    result = simulate(Sizes(), console.print)
    table = Table("figure", "value", title="load step")
    for name, value in result["summary"].items():
        table.add_row(name, f"{value:.4g}")
    for name, holds in result["bars"].items():
        table.add_row(name, "yes" if holds else "NO")
    console.print(table)
    seconds = round(time.perf_counter() - start)
    write({"bench": "load_step", **environment(), "seconds": seconds, **result}, json)
    if not all(result["bars"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
