"""The load step with the bundled model's own selections: `python -m bench.served_step`.

The shape of `bench.load_step`, without a simulation: the engine serves left-out texts, as many at a
time as a phase says; who ends gives place to the next text, and when the load falls, the newest are
cancelled. `fixed` gives every request 2 K slots per pool, `adaptive` has as many in all. A text has
the same tokens under both. Shares are fetched / selected rows.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from bench.concurrency import FIXED_SELECTIONS
from bench.crowd import Phase
from bench.load_sweep import make_requests
from bench.record import environment, save, write
from dhisparse_jax.cli.options import BUNDLED_MODEL
from dhisparse_jax.cli.session import default_dispatch_steps
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Finished, NewTokens, StepDone
from dhisparse_jax.engine.replay import warm_up
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models import registry

POLICIES = (Policy.FIXED, Policy.ADAPTIVE)

SETTLING = 40
"""First steps of a phase that its share leaves out."""


def phases(rows: int, scale: float) -> tuple[Phase, ...]:
    """Up to `rows` requests and down again; lengths are multiplied by `scale`."""
    steps = lambda count: max(SETTLING + 1, round(count * scale))
    return (
        Phase("low", 1, steps(300)),
        Phase("half", rows // 2, steps(300)),
        Phase("high", rows, steps(300)),
        Phase("low again", 1, steps(600)),
    )


def main(
    rows: Annotated[int, typer.Option(help="Request rows; the largest load.")] = 16,
    scale: Annotated[float, typer.Option(help="Length of the phases, as a factor.")] = 1.0,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 2000,
    new_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 400,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Serve texts under a load that goes up and down, and compare the policies."""
    loaded = registry.load(BUNDLED_MODEL)
    requests = make_requests(loaded, 2 * rows, prompt_bytes, new_tokens)
    script = phases(rows, scale)
    about: dict[str, Any] = {"bench": "served_step", **environment(), "rows": rows}
    about["phases"] = [phase._asdict() for phase in script]
    crowds = {policy.value: Crowd(_engine(loaded, policy, rows, requests)) for policy in POLICIES}
    document = about
    for crowd in crowds.values():
        crowd.run(script, requests)
        document = about | {
            "summary": summary(crowds),
            "series": {name: crowd.series() for name, crowd in crowds.items()},
        }
        save(document, json)
    Console(stderr=True).print(_table(document["summary"]))
    write(document, json)
    if not document["summary"]["same_tokens"]:
        raise typer.Exit(1)


def _engine(
    loaded: registry.LoadedModel, policy: Policy, rows: int, requests: Sequence[Request]
) -> Engine:
    cfg = HierarchyConfig(
        geometry=loaded.model.geometry,
        policy=policy,
        requests=rows,
        capacity=max(len(request.prompt) + request.max_new_tokens for request in requests),
        hot_rows=FIXED_SELECTIONS * loaded.model.geometry.top_k,
    )
    steps = default_dispatch_steps(loaded.params)
    return Engine(loaded.model, loaded.params, cfg, steps=steps)


class Step(NamedTuple):
    """One step of a crowd.

    Attributes:
        phase: its name.
        requests: requests in rows.
        selected: selected rows.
        fetched: how many of them came from the host.
        seconds: since the beginning.
    """

    phase: str
    requests: int
    selected: int
    fetched: int
    seconds: float


class Crowd:
    """Keeps as many requests in an engine as a phase says.

    Args:
        engine: where they run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[int, int] = {}  # request -> which text
        self._next = 0
        self.steps: list[Step] = []
        self.texts: dict[int, list[int]] = {}

    def run(self, script: Sequence[Phase], requests: Sequence[Request]) -> None:
        """Play all phases; texts are taken in order, from the first again after the last."""
        warm_up(self._engine)
        begin = time.perf_counter()
        for phase in script:
            end = len(self.steps) + phase.steps
            while len(self.steps) < end:
                self._keep(phase.requests, requests)
                self._round(phase.name, begin)
        self._keep(0, requests)
        while not self._engine.idle:
            list(self._engine.advance())

    def _keep(self, load: int, requests: Sequence[Request]) -> None:
        for number in list(self._running)[load:]:
            self._engine.cancel(number)
            del self._running[number]
        while len(self._running) < load:
            text = self._next % len(requests)
            number = self._engine.submit(requests[text], draw=text)
            self._running[number] = self._next
            self._next += 1

    def _round(self, phase: str, begin: float) -> None:
        for event in self._engine.advance():
            match event:
                case NewTokens(number, tokens) if number in self._running:
                    self.texts.setdefault(self._running[number], []).extend(tokens)
                case Finished(number):
                    self._running.pop(number, None)
                case StepDone(_, metrics):
                    count, seconds = self._engine.counts[0], time.perf_counter() - begin
                    rows = metrics.selected_rows, metrics.fetched_rows
                    self.steps.append(Step(phase, count, *rows, seconds))

    def series(self) -> dict[str, list[Any]]:
        """Every step, column by column."""
        return {
            "requests": [step.requests for step in self.steps],
            "fetched_share": [step.fetched / max(step.selected, 1) for step in self.steps],
            "seconds": [step.seconds for step in self.steps],
        }

    def share(self, phase: str) -> float:
        """Fetched share of a phase once it has settled."""
        steps = [step for step in self.steps if step.phase == phase][SETTLING:]
        return sum(step.fetched for step in steps) / max(sum(step.selected for step in steps), 1)


def summary(crowds: dict[str, Crowd]) -> dict[str, Any]:
    """Shares by policy and phase, and whether texts agree as far as both were written."""
    done = {name: crowd for name, crowd in crowds.items() if crowd.steps}
    names = dict.fromkeys(step.phase for crowd in done.values() for step in crowd.steps)
    first, *others = done.values()
    agree = all(
        all(a == b for a, b in zip(text, other.texts.get(number, ()), strict=False))
        for other in others
        for number, text in first.texts.items()
    )
    shares = {name: {phase: crowd.share(phase) for phase in names} for name, crowd in done.items()}
    return {"fetched_share": shares, "same_tokens": agree}


def _table(found: dict[str, Any]) -> Table:
    table = Table(title="share of the selected rows that was fetched from host memory")
    table.add_column("load")
    shares = found["fetched_share"]
    for name in shares:
        table.add_column(name, justify="right")
    for phase in next(iter(shares.values())):
        table.add_row(phase, *(f"{share[phase]:.1%}" for share in shares.values()))
    return table


if __name__ == "__main__":
    typer.run(main)
