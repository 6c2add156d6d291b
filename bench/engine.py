"""What the engine costs: seconds of its steps against those of the device by itself.

All requests decode. In turn, blocks of rounds through the engine, whose events are listened to, and
blocks of dispatches back to back, whose results nobody reads: so growing texts slow both alike. The
overhead is what a step through the engine takes longer, as a share of a step by itself. `launch` is
the host's time of one dispatch, which the device does not wait for unless it is the longer one.
"""

import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.load_sweep import make_requests
from bench.record import environment, save, write
from dhisparse_jax.cli.options import BUNDLED_MODEL, NO_DRAFT, DraftOptions
from dhisparse_jax.cli.session import load_draft, rule_of
from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, StepDone
from dhisparse_jax.models import registry

BAR = 0.05
"""Largest overhead at 128 requests on an H200."""

WARM_UP = 4


def main(  # noqa: PLR0913  # options of a command
    loads: Annotated[str, typer.Option(help="Requests at the same time, comma-separated.")] = "8",
    steps: Annotated[int, typer.Option(help="Steps in a block.")] = 32,
    blocks: Annotated[int, typer.Option(help="Blocks of either kind.")] = 5,
    policy: Annotated[Policy, typer.Option(help="How device memory is shared out.")] = (
        Policy.ADAPTIVE
    ),
    draft: Annotated[str, typer.Option(help="A draft's name or folder.")] = NO_DRAFT,
    dispatch_steps: Annotated[
        str, typer.Option(help="Decode steps in one dispatch, comma-separated.")
    ] = "1",
    hot_rows: Annotated[int, typer.Option(help="Hot slots per request row.")] = 256,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 1000,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure the overhead of the engine at one or several loads."""
    rows: list[dict[str, Any]] = []
    about = {"bench": "engine", **environment(), "bar": BAR}
    for load, together in itertools.product(numbers(loads), numbers(dispatch_steps)):
        dispatches = -(-steps // together)
        room = 2 * together * (dispatches + 1) * blocks
        engine = _engine(load, policy, draft, hot_rows, prompt_bytes, room, together)
        setting = {"requests": load, "policy": policy.value, "draft": draft}
        rows.append(setting | {"dispatch_steps": together, "steps": together * dispatches})
        rows[-1] |= _overhead(engine, dispatches, blocks)
        save(about | {"rows": rows}, json)
    Console(stderr=True).print(_table(rows))
    write(about | {"rows": rows}, json)


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(number) for number in text.split(",")]


def _engine(
    load: int,
    policy: Policy,
    draft_name: str,
    hot_rows: int,
    prompt_bytes: int,
    steps: int,
    together: int,
) -> Engine:
    """An engine in which so many requests decode, with so many steps left at least."""
    loaded = registry.load(BUNDLED_MODEL)
    draft = load_draft(DraftOptions.of(BUNDLED_MODEL, draft_name, None), loaded)
    queries = draft.drafter.length + 1
    new_tokens = queries * (steps + 2 * WARM_UP * together)
    requests = make_requests(loaded, load, prompt_bytes, new_tokens)
    cfg = HierarchyConfig(
        geometry=loaded.model.geometry,
        policy=policy,
        requests=load,
        capacity=prompt_bytes + new_tokens,
        queries=queries,
        hot_rows=hot_rows,
        tail=usual_tail(queries),
    )
    rule = rule_of(draft.drafter, draft_name != NO_DRAFT)
    engine = Engine(loaded.model, loaded.params, cfg, draft=draft, rule=rule, steps=together)
    for request in requests:
        engine.submit(request)
    while engine.counts[1]:
        list(engine.advance())
    return engine


def _overhead(engine: Engine, dispatches: int, blocks: int) -> dict[str, Any]:
    """Milliseconds of a step through the engine and by itself, and of its launch; medians."""
    _through_engine(engine, WARM_UP)
    _alone(engine, WARM_UP)
    through: list[float] = []
    alone: list[float] = []
    launches: list[float] = []
    for _ in range(blocks):
        through.append(_through_engine(engine, dispatches))
        seconds, launch = _alone(engine, dispatches)
        alone.append(seconds)
        launches.append(launch)
    overhead = float(np.median(np.asarray(through) / np.asarray(alone))) - 1.0
    each = 1e3 / engine.steps
    return {
        "engine_ms": each * float(np.median(through)),
        "step_ms": each * float(np.median(alone)),
        "launch_ms": each * float(np.median(launches)),
        "overhead_share": overhead,
        "holds": overhead <= BAR,
    }


def _through_engine(engine: Engine, dispatches: int) -> float:
    """Seconds of a dispatch, from the landing of one to that of the last of so many after it.

    What is launched ahead of the last one is done when it returns.
    """
    ends: list[float] = []
    tokens = 0
    while len(ends) <= dispatches * engine.steps:
        for event in engine.advance():
            match event:
                case StepDone():
                    ends.append(time.perf_counter())
                case NewTokens():
                    tokens += len(event.tokens)
    assert tokens > dispatches, "a step through the engine gave no token"
    jax.block_until_ready(engine.texts)
    landed = ends[engine.steps - 1 :: engine.steps]
    return (landed[-1] - landed[0]) / (len(landed) - 1)


def _alone(engine: Engine, dispatches: int) -> tuple[float, float]:
    """Seconds of a dispatch, back to back; and of its launch."""
    launches: list[float] = []
    begin = time.perf_counter()
    for _ in range(dispatches):
        launch = time.perf_counter()
        engine.dispatch()
        launches.append(time.perf_counter() - launch)
    jax.block_until_ready(engine.texts)
    return (time.perf_counter() - begin) / dispatches, float(np.median(launches))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"overhead of the engine (bar: {BAR:.0%})")
    for name in (
        "requests",
        "steps together",
        "step, ms",
        "through the engine",
        "launch",
        "overhead",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        times = (row["step_ms"], row["engine_ms"], row["launch_ms"])
        cells = (f"{value:.2f}" for value in times)
        table.add_row(
            str(row["requests"]), str(row["dispatch_steps"]), *cells, f"{row['overhead_share']:.1%}"
        )
    return table


if __name__ == "__main__":
    typer.run(main)
