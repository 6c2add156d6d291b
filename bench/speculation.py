"""Speculation against the load, on the bundled model: tokens per second by draft and draft length.

One engine per draft, draft length and rule, all in one process. At each load, every engine writes
the same texts, and takes turns of some rounds with the others, so that what slows the machine
slows all alike; what counts is the time of an engine's own turns, until its first text ends. Tokens
must be the same everywhere (greedy, float32). `auto` verifies as many proposals as pay; its loss is
against the best fixed length of the same draft at the same load.
"""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.load_sweep import make_requests
from bench.record import environment, save, write
from dhisparse_jax.cli.checks import AUTO
from dhisparse_jax.cli.options import BUNDLED_MODEL, NO_DRAFT, DraftOptions
from dhisparse_jax.cli.session import default_dispatch_steps, load_draft, rule_of
from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Acceptance, Finished, NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models import registry
from dhisparse_jax.models.glm.dense import served_logits

STEPS = 16
"""Steps of an engine in a turn: several dispatches, so that one is ready while another runs."""

CHUNK = 256
"""Queries at a time in a whole pass."""

Row = dict[str, Any]


def main(
    draft: Annotated[list[str], typer.Option(help="A draft's name or folder; repeatable.")],
    lengths: Annotated[str, typer.Option(help="Draft lengths, comma-separated.")] = "1,3,7,auto",
    loads: Annotated[str, typer.Option(help="Texts at the same time.")] = "1,4,8",
    policy: Annotated[Policy, typer.Option(help="How device memory is shared out.")] = (
        Policy.ADAPTIVE
    ),
    hot_rows: Annotated[int, typer.Option(help="Hot slots per request row.")] = 256,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 2000,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write per request.")] = 1024,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Sweep drafts, draft lengths and loads; check that no token changes."""
    loaded = registry.load(BUNDLED_MODEL)
    counts = [int(load) for load in loads.split(",")]
    requests = make_requests(loaded, max(counts), prompt_bytes, new_tokens)
    capacity = max(len(request.prompt) for request in requests) + new_tokens
    named = [(NO_DRAFT, None)] + [(name, length) for name in draft for length in lengths.split(",")]
    options = [DraftOptions.of(BUNDLED_MODEL, *names) for names in named]
    engines = [_engine(loaded, asked, policy, max(counts), capacity, hot_rows) for asked in options]
    with ThreadPoolExecutor() as together:  # most of it is compilation
        list(together.map(lambda engine: _warm_up(engine, requests), engines))
    about = {"bench": "speculation", **environment(), "policy": policy.value}
    rows: list[Row] = []
    for load in counts:
        runs = _measured(engines, requests[:load])
        pairs = zip(options, runs, strict=True)
        found = _compared([_setting(asked) | run.row(load) for asked, run in pairs])
        rows += [_judged(loaded, requests, row) for row in found]
        save(about | {"rows": rows}, json)
    Console(stderr=True).print(_table(rows))
    write(about | {"rows": rows}, json)


def _engine(
    loaded: registry.LoadedModel,
    asked: DraftOptions,
    policy: Policy,
    rows: int,
    capacity: int,
    hot_rows: int,
) -> Engine:
    draft = load_draft(asked, loaded)
    queries = draft.drafter.length + 1
    cfg = HierarchyConfig(
        geometry=loaded.model.geometry,
        policy=policy,
        requests=rows,
        capacity=capacity,
        queries=queries,
        hot_rows=hot_rows,
        tail=usual_tail(queries),
    )
    rule = rule_of(draft.drafter, asked.auto)
    steps = default_dispatch_steps(loaded.params)
    return Engine(loaded.model, loaded.params, cfg, draft=draft, rule=rule, steps=steps)


def _setting(asked: DraftOptions) -> Row:
    return {"draft": asked.name, "length": AUTO if asked.auto else asked.length or 0}


@dataclasses.dataclass
class Run:
    """An engine's own turns so far.

    Attributes:
        engine: with all texts in decode.
        seconds: of its turns.
        written: tokens of these.
        texts: tokens of every request, the first of each from its prefill.
        ended: a text has ended.
    """

    engine: Engine
    seconds: float = 0.0
    written: int = 0
    texts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    ended: bool = False
    metrics: StepMetrics = dataclasses.field(default_factory=StepMetrics)
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    steps: int = 0

    def begin(self, requests: Sequence[Request]) -> None:
        """Prefill them all."""
        for number, request in enumerate(requests):
            self.engine.submit(request, draw=number)
        while self.engine.counts[1]:
            self._round()
        self._turn()  # not timed
        self.seconds, self.written, self.steps = 0.0, 0, 0
        self.metrics, self.acceptance = StepMetrics(), Acceptance()

    def turn(self) -> None:
        """Some rounds; unless a text ended in them, they count."""
        before = dataclasses.replace(self)
        self._turn()
        if self.ended:
            self.seconds, self.written = before.seconds, before.written

    def end(self) -> None:
        """Leave the engine empty."""
        for number in self.texts:
            self.engine.cancel(number)
        while not self.engine.idle:
            list(self.engine.advance())

    def row(self, load: int) -> Row:
        """Its figures."""
        return {
            "load": load,
            "tokens_per_s": self.written / self.seconds,
            "seconds": self.seconds,
            "steps": self.steps,
            "accept_length": self.acceptance.length,
            "accept_by_position": list(self.acceptance.by_position),
            "fetched_share": self.metrics.fetched_rows / max(self.metrics.selected_rows, 1),
            "fetched_bytes_per_token": self.metrics.host_bytes_read / max(self.written, 1),
            "tokens": [self.texts[number] for number in sorted(self.texts)],
        }

    def _turn(self) -> None:
        begin = time.perf_counter()
        done = self.steps
        while self.steps < done + STEPS and not self.engine.idle:
            self._round()
        jax.block_until_ready(self.engine.texts)
        self.seconds += time.perf_counter() - begin

    def _round(self) -> None:
        for event in self.engine.advance():
            match event:
                case NewTokens(number, tokens):
                    self.texts.setdefault(number, []).extend(tokens)
                    self.written += len(tokens)
                case StepDone(_, metrics, acceptance):
                    self.steps += 1
                    self.metrics += metrics
                    self.acceptance += acceptance
                case Finished():
                    self.ended = True


def _measured(engines: Sequence[Engine], requests: Sequence[Request]) -> list[Run]:
    """What every engine did with the same requests."""
    runs = [Run(engine) for engine in engines]
    for run in runs:
        run.begin(requests)
    while not all(run.ended for run in runs):
        for run in runs:
            if not run.ended:
                run.turn()
    for run in runs:
        run.end()
    return runs


def _warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Compile, and learn what pays; texts begin a byte later, so that none is shared."""
    shifted = [dataclasses.replace(each, prompt=each.prompt[1:]) for each in requests]
    for _ in engine.run([dataclasses.replace(each, max_new_tokens=64) for each in shifted]):
        pass


def _compared(rows: list[Row]) -> list[Row]:
    """Rows of one load with whether their tokens are those without a draft, speed-up, and loss."""
    plain = rows[0]
    done: list[Row] = []
    for row in rows:
        figures = {key: value for key, value in row.items() if key != "tokens"}
        figures["differences"] = _differences(row["tokens"], plain["tokens"])
        figures["same_tokens"] = not figures["differences"]
        figures["speed_up"] = row["tokens_per_s"] / plain["tokens_per_s"]
        if row["length"] == AUTO:
            figures["loss"] = 1.0 - row["tokens_per_s"] / _best_fixed(rows, row)
        done.append(figures)
    return done


def _differences(texts: list[list[int]], others: list[list[int]]) -> list[Row]:
    """The first place where two texts of a request differ, as far as both were written."""
    found: list[Row] = []
    for request, pair in enumerate(zip(texts, others, strict=True)):
        places = enumerate(zip(*pair, strict=False))
        first = next((place for place in places if place[1][0] != place[1][1]), None)
        if first is not None:
            place, (token, plain) = first
            before = pair[1][:place]
            found.append({"request": request, "token": token, "plain": plain, "before": before})
    return found


def _judged(loaded: registry.LoadedModel, requests: Sequence[Request], row: Row) -> Row:
    """The row with how much more a whole pass over the text likes the token of the run without.

    A difference with a margin of rounding, 1e-5 or less of logits around 10, is a tie that programs
    for other numbers of queries break in other ways; with more, it is a fault.
    """
    judged: list[Row] = []
    for found in row["differences"]:
        written = found.pop("before")
        text = (*requests[found["request"]].prompt, *written)
        logits = _last_logits(loaded, text)
        margin = float(logits[found["plain"]] - logits[found["token"]])
        judged.append(found | {"place": len(written), "margin": margin})
    return row | {"differences": judged}


def _last_logits(loaded: registry.LoadedModel, text: Sequence[int]) -> np.ndarray:
    """Logits after a text, from a whole pass without a hierarchy."""
    padded = np.zeros((1, -(-len(text) // CHUNK) * CHUNK), np.int32)
    padded[0, : len(text)] = text
    served: Any = loaded.model
    logits = served_logits(served.graph, loaded.params, jnp.asarray(padded), CHUNK)
    return np.asarray(logits[0, len(text) - 1])


def _best_fixed(rows: list[Row], row: Row) -> float:
    """Tokens per second of the best fixed length of the same draft, if any ran."""
    rivals = [
        other["tokens_per_s"]
        for other in rows
        if other["draft"] == row["draft"] and other["length"] != AUTO
    ]
    return max(rivals, default=row["tokens_per_s"])


def _table(rows: list[Row]) -> Table:
    table = Table(title="Speculation against the load")
    for name in ("draft", "length", "load", "tokens/s", "x plain", "accept", "fetched", "same"):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for row in rows:
        table.add_row(
            Path(row["draft"]).name,
            str(row["length"]),
            str(row["load"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['speed_up']:.2f}",
            f"{row['accept_length']:.2f}",
            f"{row['fetched_share']:.1%}",
            "yes" if row["same_tokens"] else "NO",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
