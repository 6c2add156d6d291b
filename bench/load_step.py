"""The load step: what `fixed` and `adaptive` fetch while the load goes up and down again.

Simulated exactly (`bench.simulator`) on the calibrated GLM trace at K = 2048 and 100K context.
Every request has two pools: one selects anew a quarter of what the published curve says, one 1.75
times as much; their mean is the published curve. Both policies have the same device memory, enough
for `ROWS` requests with 2 K per pool under `fixed`. `adaptive` may give each no less than K, so it
takes in twice as many. Requests end after some time and others take their place (`bench.crowd`).

`settle_steps` and `adaptive_low`: when the load falls, the request that stays gets the pages at
once, but residency changes copy nothing, so it fills them with what it misses, and its share falls
slowly. The load has settled when the next request, whose prompt fills its pages, has taken its
place. `survivor` says how far a single request comes by its misses alone.

`sharing` compares where pages go by measured benefit with as much memory dealt evenly to as many
requests and pools.

Moves are pages that the controller gives or takes in a step; `moves_bound` bounds them. What an
admission takes from others is its own, at most an even share, once (`admission_pages_max`);
`oscillation_moves_per_token_max` counts both over whole periods of a load that changes every 10
steps. Shares are fetched / selected rows. The exit status is 1 if a bar is missed.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.crowd import EVENT, LIFE, Crowd, Phase, Run
from bench.record import RESULTS, environment, write
from bench.script import Script, script
from bench.simulator import Simulator, geometry
from bench.traces import GLM_5_1, trace
from dhisparse_jax.config import HierarchyConfig, Policy

ROWS = 16
"""Requests that `fixed` holds."""

LOCALITIES = (0.25, 1.75)
"""Misses of the pools of a request, in units of the published ones."""

FIXED_SHARES = (0.13, 0.15)
SETTLED_SHARE = 0.014
SETTLED_STEPS = 200
RELEASE_STEPS = 2
FLOOR_MARGIN = 1.10
SETTLING = 40
"""First steps of a phase that its share leaves out."""

PHASES = (
    Phase("low", 1, 60),
    Phase("half", ROWS // 2, 60),
    Phase("high", ROWS, 100),
    Phase("exhausted", 2 * ROWS, 80),
    Phase("low again", 1, 300),
)
OSCILLATION = tuple(Phase("oscillation", ROWS // 2 * (1 + n % 2), EVENT) for n in range(12))
PERIOD = 2 * EVENT


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is simulated."""

    k: int = 2048
    history: int = 100_000
    moves_per_step: int = 16

    @property
    def steps(self) -> int:
        """Steps of a trace: of the longest request, and of the survivor."""
        return max(LIFE, PHASES[-1].steps) + EVENT

    def simulator(self, play: Script, policy: Policy, rows: int) -> Simulator:
        """A hierarchy with the device memory that there is, and so many rows."""
        cfg = HierarchyConfig(
            geometry=geometry(self.k, len(LOCALITIES)),
            policy=policy,
            requests=rows,
            capacity=self.history + self.steps,
            hot_rows=2 * ROWS * self.k // rows,
            moves_per_step=self.moves_per_step,
        )
        return Simulator(cfg, play)

    def script(self) -> Script:
        """Two traces per kind of pool, the kinds one after the other."""
        kinds = [
            GLM_5_1.with_misses(factor * (1 - GLM_5_1.shares[0]))
            for factor in (*LOCALITIES, *LOCALITIES)
        ]
        sizes = {"k": self.k, "history": self.history, "steps": self.steps}
        return script([trace(kind, seed=seed, **sizes) for seed, kind in enumerate(kinds)])


def simulate(sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """All runs, and what they say."""
    play, even = sizes.script(), {phase.name: phase for phase in PHASES[:2]}
    cases = {
        "fixed": (Policy.FIXED, ROWS, PHASES),
        "adaptive": (Policy.ADAPTIVE, 2 * ROWS, PHASES),
        "fixed_at_floor": (Policy.FIXED, 2 * ROWS, (Phase("floor", 2 * ROWS, 40),)),
        "oscillation": (Policy.ADAPTIVE, 2 * ROWS, OSCILLATION),
        **{name: (Policy.FIXED, phase.requests, (phase,)) for name, phase in even.items()},
    }
    runs: dict[str, Run] = {}
    start = time.perf_counter()
    for name, (policy, rows, phases) in cases.items():
        runs[name] = Crowd(sizes.simulator(play, policy, rows)).run(phases)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    survivor = survive(sizes.simulator(play, Policy.ADAPTIVE, 2 * ROWS))
    say(f"survivor: {time.perf_counter() - start:.0f} s")
    shares = {phase.name: phase_shares(runs, phase) for phase in PHASES if phase.requests <= ROWS}
    alone = slice(SETTLING, None)
    sharing = {name: compare(runs["adaptive"], name, runs[name], alone) for name in even}
    sharing["high"] = compare(runs["adaptive"], "high", runs["fixed"], steps_of("high"))
    summary = summarise(runs, bound=float(sizes.moves_per_step))
    return {
        "sizes": {**dataclasses.asdict(sizes), "rows": ROWS, "localities": LOCALITIES},
        "phases": [phase._asdict() for phase in PHASES],
        "summary": summary,
        "bars": bars(summary, shares, sharing),
        "shares": shares,
        "sharing": sharing,
        "survivor": {f"after {steps}": survivor[steps - 1] for steps in (100, SETTLED_STEPS, 300)},
        "admission_pages_max": max(
            pages for name in ("adaptive", "oscillation") for _, pages in runs[name].admissions
        ),
        "oscillation_moves_per_token_max": float(
            runs["oscillation"].all_moves_per_token(PERIOD)[1:].max()
        ),
        "series": {
            name: series(runs[name])
            for name in ("fixed", "adaptive", "fixed_at_floor", "oscillation")
        },
    }


def survive(sim: Simulator) -> list[float]:
    """Fetched share of a request after all others have left a full hierarchy, step by step."""
    for number in range(sim.cfg.requests):
        first = number % 2 * sim.cfg.pools
        sim.join(range(first, first + sim.cfg.pools))
    for row in range(1, sim.cfg.requests):
        sim.leave(row)
    alone = Run(sim.run(PHASES[-1].steps), [], [])
    return [round(float(share), 5) for share in alone.shares()]


def steps_of(name: str, settling: int = SETTLING) -> slice:
    """The steps of a phase without its first ones."""
    start = 0
    for phase in PHASES:
        if phase.name == name:
            return slice(start + settling, start + phase.steps)
        start += phase.steps
    raise KeyError(name)


def phase_shares(runs: dict[str, Run], phase: Phase) -> dict[str, float]:
    """What both policies fetch at a load."""
    return {name: runs[name].share(steps_of(phase.name)) for name in ("fixed", "adaptive")}


def compare(adaptive: Run, name: str, even: Run, steps: slice) -> dict[str, Any]:
    """Measured benefit in a phase against even sharing of as much memory in steps of `even`."""
    return {
        "even": even.share(steps),
        "measured": adaptive.share(steps_of(name)),
        "pages_even": even.pages(steps),
        "pages_measured": adaptive.pages(steps_of(name)),
    }


def settle_steps(run: Run, width: int = EVENT) -> int:
    """Steps after the fall of the load until the share stays at its bar, `width` steps averaged."""
    shares = run.shares()[steps_of("low again", 0)].reshape(-1, width).mean(axis=1)
    above = np.flatnonzero(shares > SETTLED_SHARE)
    return int(width * (above.max(initial=-1) + 1))


def summarise(runs: dict[str, Run], bound: float) -> dict[str, Any]:
    """The figures of the load step."""
    fixed, adaptive, swinging = runs["fixed"], runs["adaptive"], runs["oscillation"]
    high, low = steps_of("high"), steps_of("low again", SETTLED_STEPS)
    moves = max(adaptive.moves_per_token().max(), swinging.moves_per_token().max())
    return {
        "fixed_low": fixed.share(low),
        "fixed_high": fixed.share(high),
        "adaptive_low": adaptive.share(low),
        "adaptive_high": adaptive.share(high),
        "adaptive_exhausted": adaptive.share(steps_of("exhausted", 20)),
        "fixed_at_floor": runs["fixed_at_floor"].share(slice(20, None)),
        "release_steps_max": max(adaptive.release_steps + swinging.release_steps),
        "settle_steps": settle_steps(adaptive),
        "moves_per_token_max": float(moves),
        "moves_bound": bound,
    }


def bars(
    summary: dict[str, Any],
    shares: dict[str, dict[str, float]],
    sharing: dict[str, dict[str, Any]],
) -> dict[str, bool]:
    """What must hold; `shares` and `sharing` by phase."""
    least, most = FIXED_SHARES
    return {
        "fixed at low load 13-15 %": least <= summary["fixed_low"] <= most,
        "fixed at high load 13-15 %": least <= summary["fixed_high"] <= most,
        "adaptive at low load <= 1.4 %": summary["adaptive_low"] <= SETTLED_SHARE,
        "adaptive below fixed": all(load["adaptive"] < load["fixed"] for load in shares.values()),
        "exhausted within 10 % of fixed at the floor": summary["adaptive_exhausted"]
        <= FLOOR_MARGIN * summary["fixed_at_floor"],
        "released within 2 steps": summary["release_steps_max"] <= RELEASE_STEPS,
        "settled within 200 steps": summary["settle_steps"] <= SETTLED_STEPS,
        "moves within the bound": summary["moves_per_token_max"] <= summary["moves_bound"],
        "benefit better than even": all(x["measured"] < x["even"] for x in sharing.values()),
    }


def series(run: Run) -> dict[str, list[Any]]:
    """A run step by step."""
    return {
        "requests": run.record.active.sum(axis=1).tolist(),
        "fetched_share": [round(float(share), 5) for share in run.shares()],
        "held_pages": run.record.held.sum(axis=(1, 2)).tolist(),
        "moved_pages": run.moved().tolist(),
    }


def report(result: dict[str, Any], console: Console) -> None:
    """The figures as tables."""
    table = Table("figure", "value", title="load step")
    for name, value in result["summary"].items():
        table.add_row(name, f"{value:.4g}")
    for name, holds in result["bars"].items():
        table.add_row(name, "yes" if holds else "NO")
    console.print(table)
    table = Table("load", "fetched, even", "fetched, measured", "pages, even", "pages, measured")
    pages = lambda each: " + ".join(f"{number:.0f}" for number in each)
    for name, each in result["sharing"].items():
        fetched = (f"{each[how]:.4f}" for how in ("even", "measured"))
        table.add_row(name, *fetched, pages(each["pages_even"]), pages(each["pages_measured"]))
    console.print(table)


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = (
        RESULTS / "load_step.json"
    ),
) -> None:
    """Simulate the load step and check its bars."""
    console, start = Console(stderr=True), time.perf_counter()
    result = simulate(Sizes(), console.print)
    report(result, console)
    seconds = round(time.perf_counter() - start)
    write({"bench": "load_step", **environment(), "seconds": seconds, **result}, json)
    if not all(result["bars"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
