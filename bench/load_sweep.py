"""The policies against the load, on the bundled model: what each fetches with the same memory.

One engine per policy with R request rows; `fixed` and `adaptive` have the same number of hot slots
in total. For each load n = 1..R, n texts run at the same time. Tokens must be the same everywhere.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.record import RESULTS, environment, write
from dhisparse_jax.cli.prompts import cut_after_head
from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.memory import sizes
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models import registry
from dhisparse_jax.models.train.corpus import load_evaluation

Tokens = dict[int, list[int]]


def main(
    rows: Annotated[int, typer.Option(help="Request rows; the largest load.")] = 8,
    hot_rows: Annotated[int, typer.Option(help="Hot slots per request row.")] = 256,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 2000,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write per request.")] = 48,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = (
        RESULTS / "cpu" / "load_sweep.json"
    ),
) -> None:
    """Sweep the load over the three policies and check that no token changes."""
    loaded = registry.load("tiny")
    requests = make_requests(loaded, rows, prompt_bytes, new_tokens)
    capacity = max(len(request.prompt) for request in requests) + new_tokens
    results: list[dict[str, Any]] = []
    reference: list[Tokens] | None = None
    for policy in Policy:
        cfg = HierarchyConfig(
            geometry=loaded.model.geometry,
            policy=policy,
            requests=rows,
            capacity=capacity,
            hot_rows=hot_rows,
        )
        sweep, tokens = _sweep(Engine(loaded.model, loaded.params, cfg), requests)
        reference = reference or tokens
        same = tokens == reference
        results += [
            {"policy": policy.value, **row, "hot_bytes": sizes(cfg).hot_bytes, "same_tokens": same}
            for row in sweep
        ]
    Console(stderr=True).print(_table(results))
    write({"bench": "load_sweep", **environment(), "rows": results}, json)


def make_requests(
    loaded: registry.LoadedModel, count: int, prompt_bytes: int, new_tokens: int
) -> list[Request]:
    """Pieces of left-out texts up to the head of a function, each to be gone on with.

    Raises:
        ValueError: as `pieces`.
    """
    return [
        Request(
            name=name,
            prompt=loaded.tokenizer.encode(cut_after_head(piece, prompt_bytes)),
            max_new_tokens=new_tokens,
        )
        for name, piece in pieces(count, prompt_bytes)
    ]


def pieces(count: int, size: int) -> list[tuple[str, bytes]]:
    """Named pieces of left-out texts, of `size` bytes: the heads of all, then parts further on.

    Raises:
        ValueError: if the texts have not so many.
    """
    texts = load_evaluation()
    found = [
        (f"{name}+{part}", text[part : part + size])
        for part in range(0, max(map(len, texts.values())), size)
        for name, text in texts.items()
        if len(text) - part >= size
    ]
    if len(found) < count:
        raise ValueError(f"{count} texts of {size} bytes; there are {len(found)}")
    return found[:count]


def _sweep(engine: Engine, requests: list[Request]) -> tuple[list[dict[str, Any]], list[Tokens]]:
    """Every load once; what was fetched, and the tokens."""
    rows: list[dict[str, Any]] = []
    tokens: list[Tokens] = []
    for load in range(1, len(requests) + 1):
        metrics = StepMetrics()
        written: Tokens = {}
        for event in engine.run(requests[:load]):
            match event:
                case StepDone():
                    metrics += event.metrics
                case NewTokens():
                    written.setdefault(event.request, []).extend(event.tokens)
        share = metrics.fetched_rows / metrics.selected_rows
        rows.append({"load": load, "fetched_share": share, "selected_rows": metrics.selected_rows})
        tokens.append(written)
    return rows, tokens


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="share of the selected rows that was fetched from host memory")
    table.add_column("requests")
    for policy in Policy:
        table.add_column(policy.value, justify="right")
    share = {(row["policy"], row["load"]): row["fetched_share"] for row in results}
    for load in sorted({row["load"] for row in results}):
        table.add_row(str(load), *(f"{share[policy.value, load]:.1%}" for policy in Policy))
    return table


if __name__ == "__main__":
    typer.run(main)
