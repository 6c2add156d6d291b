"""Speculation against the load, on the bundled model: tokens per second by draft and draft length.

One engine per draft, draft length and rule; for each load, so many texts run at the same time.
Every engine runs each load once to compile and to learn, with texts that begin one byte later so
that none is shared, and then for the figures. Tokens must be the same everywhere (greedy,
float32). `auto` verifies as many proposals as pay; its loss is against
the best fixed length of the same draft at the same load.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.load_sweep import make_requests
from bench.record import environment, save, write
from dhisparse_jax.cli.checks import AUTO
from dhisparse_jax.cli.options import BUNDLED_MODEL, NO_DRAFT, DraftOptions
from dhisparse_jax.cli.record import RunRecord
from dhisparse_jax.cli.session import load_draft, rule_of
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models import registry

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
    new_tokens: Annotated[int, typer.Option(help="Tokens to write per request.")] = 128,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Sweep drafts, draft lengths and loads; check that no token changes."""
    loaded = registry.load(BUNDLED_MODEL)
    counts = [int(load) for load in loads.split(",")]
    requests = make_requests(loaded, max(counts), prompt_bytes, new_tokens)
    capacity = max(len(request.prompt) for request in requests) + new_tokens
    named = [(NO_DRAFT, None)] + [(name, length) for name in draft for length in lengths.split(",")]
    options = [DraftOptions.of(BUNDLED_MODEL, *names) for names in named]
    about = {"bench": "speculation", **environment(), "policy": policy.value}
    rows: list[Row] = []
    for asked in options:
        engine = _engine(loaded, asked, policy, max(counts), capacity, hot_rows)
        rows += [_setting(asked) | _measured(engine, requests[:load]) for load in counts]
        save(about | {"rows": _compared(rows)}, json)
    done = _compared(rows)
    Console(stderr=True).print(_table(done))
    write(about | {"rows": done}, json)


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
        tail=max(16, 2 * queries),
    )
    rule = rule_of(draft.drafter, asked.auto)
    return Engine(loaded.model, loaded.params, cfg, draft=draft, rule=rule)


def _setting(asked: DraftOptions) -> Row:
    return {"draft": asked.name, "length": AUTO if asked.auto else asked.length or 0}


def _measured(engine: Engine, requests: Sequence[Request]) -> Row:
    """Figures of a run after another one; a text's first token is its prefill's."""
    _run(engine, [dataclasses.replace(each, prompt=each.prompt[1:]) for each in requests])
    record = _run(engine, requests)
    decoded = record.output_tokens - len(requests)
    return {
        "load": len(requests),
        "tokens_per_s": decoded / record.decode_seconds,
        "steps": record.steps,
        "accept_length": record.acceptance.length,
        "accept_by_position": list(record.acceptance.by_position),
        "fetched_share": record.fetched_share,
        "fetched_bytes_per_token": record.totals.host_bytes_read / decoded,
        "tokens": [request.tokens for request in record.requests],
    }


def _run(engine: Engine, requests: Sequence[Request]) -> RunRecord:
    record = RunRecord.of(requests)
    for event in engine.run(requests):
        record.add(event)
    return record


def _compared(rows: list[Row]) -> list[Row]:
    """The rows with whether their tokens are those without a draft, speed-up, and loss."""
    plain = {row["load"]: row for row in rows if row["draft"] == NO_DRAFT}
    done: list[Row] = []
    for row in rows:
        base = plain[row["load"]]
        figures = {key: value for key, value in row.items() if key != "tokens"}
        figures["same_tokens"] = row["tokens"] == base["tokens"]
        figures["speed_up"] = row["tokens_per_s"] / base["tokens_per_s"]
        if row["length"] == AUTO:
            figures["loss"] = 1.0 - row["tokens_per_s"] / _best_fixed(rows, row)
        done.append(figures)
    return done


def _best_fixed(rows: list[Row], row: Row) -> float:
    """Tokens per second of the best fixed length of the same draft at the same load, if any ran."""
    rivals = [
        other["tokens_per_s"]
        for other in rows
        if (other["draft"], other["load"]) == (row["draft"], row["load"])
        and other["length"] != AUTO
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
