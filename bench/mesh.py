"""Throughput over devices: the bundled model on one device and on several, in one process.

Every device has as many request rows, all of which decode. In turn, blocks of rounds through an
engine of one device and through one of all, whose events are listened to: so growing texts slow
both alike. `speedup` is tokens per second over those of one device.
"""

import itertools
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.engine import numbers
from bench.load_sweep import make_requests
from bench.record import environment, save, write
from dhisparse_jax.cli.options import BUNDLED_MODEL, NO_DRAFT, DraftOptions
from dhisparse_jax.cli.session import default_dispatch_steps, load_draft, load_model
from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens
from dhisparse_jax.mesh import MeshShape

BAR = 1.9
"""Least speedup of two H200s at rows that fill both."""

WARM_UP = 4


def main(  # noqa: PLR0913  # options of a command
    devices: Annotated[str, typer.Option(help="Devices, comma-separated.")] = "1,2",
    rows: Annotated[str, typer.Option(help="Requests on each device, comma-separated.")] = "8",
    rounds: Annotated[int, typer.Option(help="Dispatches in a block.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks on so many devices.")] = 5,
    policy: Annotated[Policy, typer.Option(help="How device memory is shared out.")] = (
        Policy.ADAPTIVE
    ),
    draft: Annotated[str, typer.Option(help="A draft's name or folder.")] = NO_DRAFT,
    hot_rows: Annotated[int, typer.Option(help="Hot slots per request row.")] = 256,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 400,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure tokens per second at one or several numbers of devices."""
    found: list[dict[str, Any]] = []
    about = {"bench": "mesh", **environment(), "bar": BAR}
    for load in numbers(rows):
        make = lambda count, load=load: Crowd(
            count, load, policy, draft, hot_rows, prompt_bytes, rounds * (blocks + 1)
        )
        found += measure([make(count) for count in numbers(devices)], rounds, blocks)
        save(about | {"rows": found}, json)
    Console(stderr=True).print(_table(found))
    write(about | {"rows": found}, json)
    if not all(row["same_tokens"] for row in found):
        raise typer.Exit(1)


class Crowd:
    """An engine with a request in every row.

    Args:
        devices: how many.
        rows: requests on each.
        policy: how device memory is shared out.
        draft: a draft's name or folder.
        hot_rows: hot slots per request row.
        prompt_bytes: prompt length.
        dispatches: that the requests must not end in.
    """

    def __init__(  # what a run is made of
        self,
        devices: int,
        rows: int,
        policy: Policy,
        draft: str,
        hot_rows: int,
        prompt_bytes: int,
        dispatches: int,
    ) -> None:
        self.devices, self.rows = devices, rows
        mesh = MeshShape(data=devices).mesh() if devices > 1 else None
        loaded = load_model(BUNDLED_MODEL, mesh=mesh)
        proposer = load_draft(DraftOptions(draft), loaded)
        queries, steps = proposer.drafter.length + 1, default_dispatch_steps(loaded.params)
        new = (dispatches + WARM_UP + 2) * steps * queries
        cfg = HierarchyConfig(
            geometry=loaded.model.geometry,
            policy=policy,
            requests=rows,
            capacity=min(loaded.context, prompt_bytes + new + queries),
            queries=queries,
            hot_rows=hot_rows,
            tail=usual_tail(queries),
        )
        self._engine = Engine(
            loaded.model, loaded.params, cfg, draft=proposer, steps=steps, mesh=mesh
        )
        self.texts: dict[int, list[int]] = {}
        for request in make_requests(loaded, devices * rows, prompt_bytes, new):
            self._engine.submit(request)
        while self._engine.counts[1]:
            self.run(1)
        self.run(WARM_UP)

    def run(self, rounds: int) -> float:
        """Tokens per second of so many dispatches."""
        count, begin = 0, time.perf_counter()
        for event in itertools.chain.from_iterable(self._engine.advance() for _ in range(rounds)):
            if isinstance(event, NewTokens):
                self.texts.setdefault(event.request, []).extend(event.tokens)
                count += len(event.tokens)
        return count / (time.perf_counter() - begin)


def measure(crowds: list[Crowd], rounds: int, blocks: int) -> list[dict[str, Any]]:
    """Blocks of all crowds in turn, and what they come to against the first."""
    speeds = [[crowd.run(rounds) for crowd in crowds] for _ in range(blocks)]
    medians = [median(column) for column in zip(*speeds, strict=True)]
    first = crowds[0]
    return [
        {
            "devices": crowd.devices,
            "requests": crowd.devices * crowd.rows,
            "tokens_per_s": speed,
            "speedup": speed / medians[0],
            "same_tokens": _agree(first, crowd),
        }
        for crowd, speed in zip(crowds, medians, strict=True)
    ]


def _agree(one: Crowd, other: Crowd) -> bool:
    """Whether requests that both have got the same tokens, as far as both wrote them."""
    pairs = [(text, other.texts[number]) for number, text in one.texts.items()]
    return all(a == b for text, same in pairs for a, b in zip(text, same, strict=False))


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("devices", "requests", "tokens/s", "speedup", "same tokens")
    for row in found:
        speeds = f"{row['tokens_per_s']:,.0f}", f"{row['speedup']:.2f} x"
        same = "yes" if row["same_tokens"] else "no"
        table.add_row(str(row["devices"]), str(row["requests"]), *speeds, same)
    return table


if __name__ == "__main__":
    typer.run(main)
