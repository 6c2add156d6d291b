"""What the engine costs: seconds of its steps against those of the device by itself.

All requests decode. In turn, blocks of rounds through the engine, whose events are listened to, and
blocks of dispatches back to back, whose results nobody reads: so growing texts slow both alike. The
overhead is what a step through the engine takes longer, as a share of a step by itself. `launch` is
the host's time of one dispatch, which the device does not wait for unless it is the longer one.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.load_sweep import make_requests
from bench.record import environment, write
from dhisparse_jax.cli.options import BUNDLED_MODEL, NO_DRAFT, DraftOptions
from dhisparse_jax.cli.session import load_draft, rule_of
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, StepDone
from dhisparse_jax.models import registry

BAR = 0.05
"""Largest overhead at 128 requests on an H200."""

WARM_UP = 4


def main(
    loads: Annotated[str, typer.Option(help="Requests at the same time, comma-separated.")] = "8",
    steps: Annotated[int, typer.Option(help="Steps in a block.")] = 32,
    blocks: Annotated[int, typer.Option(help="Blocks of either kind.")] = 5,
    policy: Annotated[Policy, typer.Option(help="How device memory is shared out.")] = (
        Policy.ADAPTIVE
    ),
    draft: Annotated[str, typer.Option(help="A draft's name or folder.")] = NO_DRAFT,
    hot_rows: Annotated[int, typer.Option(help="Hot slots per request row.")] = 256,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 1000,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure the overhead of the engine at one or several loads."""
    rows: list[dict[str, Any]] = []
    for load in (int(load) for load in loads.split(",")):
        engine = _engine(load, policy, draft, hot_rows, prompt_bytes, 2 * steps * blocks)
        rows.append({"requests": load, "policy": policy.value, "draft": draft, "steps": steps})
        rows[-1] |= _overhead(engine, steps, blocks)
    Console(stderr=True).print(_table(rows))
    write({"bench": "engine", **environment(), "bar": BAR, "rows": rows}, json)


def _engine(
    load: int, policy: Policy, draft_name: str, hot_rows: int, prompt_bytes: int, steps: int
) -> Engine:
    """An engine in which so many requests decode, with so many steps left at least."""
    loaded = registry.load(BUNDLED_MODEL)
    draft = load_draft(DraftOptions.of(BUNDLED_MODEL, draft_name, None), loaded)
    queries = draft.drafter.length + 1
    new_tokens = queries * (steps + 2 * WARM_UP)
    requests = make_requests(loaded, load, prompt_bytes, new_tokens)
    cfg = HierarchyConfig(
        geometry=loaded.model.geometry,
        policy=policy,
        requests=load,
        capacity=prompt_bytes + new_tokens,
        queries=queries,
        hot_rows=hot_rows,
        tail=max(16, 2 * queries),
    )
    rule = rule_of(draft.drafter, draft_name != NO_DRAFT)
    engine = Engine(loaded.model, loaded.params, cfg, draft=draft, rule=rule)
    for request in requests:
        engine.submit(request)
    while engine.counts[1]:
        list(engine.advance())
    return engine


def _overhead(engine: Engine, steps: int, blocks: int) -> dict[str, Any]:
    """Milliseconds of a step through the engine and by itself, and of its launch; medians."""
    _through_engine(engine, WARM_UP)
    _alone(engine, WARM_UP)
    through: list[float] = []
    alone: list[float] = []
    launches: list[float] = []
    for _ in range(blocks):
        through.append(_through_engine(engine, steps))
        seconds, launch = _alone(engine, steps)
        alone.append(seconds)
        launches.append(launch)
    step = float(np.median(alone))
    overhead = float(np.median(np.asarray(through) / np.asarray(alone))) - 1.0
    return {
        "engine_ms": 1e3 * float(np.median(through)),
        "step_ms": 1e3 * step,
        "launch_ms": 1e3 * float(np.median(launches)),
        "overhead_share": overhead,
        "holds": overhead <= BAR,
    }


def _through_engine(engine: Engine, steps: int) -> float:
    """Seconds of a step, between the landings of the first and the last of so many and one more.

    What is launched ahead of the last one is done when it returns.
    """
    ends: list[float] = []
    tokens = 0
    while len(ends) <= steps:
        for event in engine.advance():
            match event:
                case StepDone():
                    ends.append(time.perf_counter())
                case NewTokens():
                    tokens += len(event.tokens)
    assert tokens > steps, "a step through the engine gave no token"
    jax.block_until_ready(engine.texts)
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _alone(engine: Engine, steps: int) -> tuple[float, float]:
    """Seconds of a dispatch, back to back; and of its launch."""
    launches: list[float] = []
    begin = time.perf_counter()
    for _ in range(steps):
        launch = time.perf_counter()
        engine.dispatch()
        launches.append(time.perf_counter() - launch)
    jax.block_until_ready(engine.texts)
    return (time.perf_counter() - begin) / steps, float(np.median(launches))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"overhead of the engine (bar: {BAR:.0%})")
    for name in ("requests", "step, ms", "through the engine", "launch", "overhead"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (row["step_ms"], row["engine_ms"], row["launch_ms"])
        cells = (f"{value:.2f}" for value in times)
        table.add_row(str(row["requests"]), *cells, f"{row['overhead_share']:.1%}")
    return table


if __name__ == "__main__":
    typer.run(main)
