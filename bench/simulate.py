"""Replay selections through the bookkeeping of the library, without a model.

`python -m bench.simulate --trace FILE --policy fixed --policy adaptive --budget 512 --budget 1024`
says what each policy fetches with each budget. FILE is what `dhisparse decode --record-selections`
wrote; `calibrated` stands for traces with the published locality of GLM-5.1. Under the policy, the
budget and the draft length of the recorded run, the fetched rows are those of the run, exactly.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from bench.record import environment, write
from bench.replay import Play, as_recorded, calibrated, replay, with_draft
from bench.simulator import StepRecord, geometry
from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.engine.recording import read_recording
from dhisparse_jax.errors import UserError

CALIBRATED = "calibrated"

COLUMNS = {
    "policy": 8, "budget": 6, "draft": 5, "steps": 6, "tokens": 6,
    "selected": 9, "fetched": 9, "share": 7, "/ token": 7, "moves": 5,
}  # fmt: skip
"""Heading and width of each of `figures`, in its order: less than 80 characters together."""


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Sizes of calibrated requests."""

    k: int
    history: int
    steps: int
    requests: int


def source(
    name: str, sizes: Calibrated, draft_length: int | None, accept: int | None
) -> tuple[HierarchyConfig, Play]:
    """What is replayed, and the hierarchy that it came from.

    Args:
        name: a file, or CALIBRATED.
        sizes: of calibrated requests.
        draft_length: proposals per step; None: as recorded, 0 for calibrated requests.
        accept: tokens per step of another draft than the recorded one; None: half of the queries.

    Raises:
        UserError: there is no such recording, or the step cannot accept so many.
    """
    queries = None if draft_length is None else draft_length + 1
    if name != CALIBRATED:
        recording = read_recording(Path(name))
        cfg = dataclasses.replace(recording.cfg, record_selections=False)
        play = as_recorded(recording)
        if queries in (None, cfg.queries) and accept is None:
            return cfg, play
        queries = queries or cfg.queries
        tokens = accepted(queries, accept)
        cfg = dataclasses.replace(cfg, queries=queries, tail=max(cfg.tail, 2 * queries))
        return cfg, with_draft(play, cfg.pools, queries, tokens)
    queries = queries or 1
    tokens = accepted(queries, accept)
    try:
        play, capacity = calibrated(**vars(sizes), queries=queries, accept=tokens)
    except ValueError as error:  # sizes that the traces cannot have
        raise UserError(str(error)) from None
    cfg = HierarchyConfig(
        geometry=geometry(sizes.k),
        policy=Policy.FIXED,
        requests=sizes.requests,
        capacity=capacity,
        queries=queries,
        hot_rows=2 * sizes.k,
        tail=usual_tail(queries),
    )
    return cfg, play


def accepted(queries: int, accept: int | None) -> int:
    """Tokens that a step accepts. Raises UserError where it has not so many queries."""
    if accept is not None and accept > queries:
        raise UserError(f"a step with {queries} queries cannot accept {accept} tokens")
    return accept or (queries + 1) // 2


def figures(cfg: HierarchyConfig, record: StepRecord) -> dict[str, Any]:
    """What a replay did. A row is one token in one layer."""
    layers = np.array(cfg.geometry.layers_per_pool)[None, :, None]
    selected, fetched = (int((x * layers).sum()) for x in (record.selected, record.fetched))
    tokens = int(record.emitted.sum())
    return {
        "policy": cfg.policy.value,
        "budget": cfg.hot_slots(0),
        "draft_length": cfg.queries - 1,
        "steps": len(record.active),
        "tokens": tokens,
        "selected_rows": selected,
        "fetched_rows": fetched,
        "fetched_share": fetched / max(selected, 1),
        "fetched_rows_per_token": fetched / max(tokens, 1),
        "moved_pages": int(np.maximum(record.moved, record.taken).sum()),
    }


def line(values: Iterable[object]) -> str:
    """What is shown of one replay, under the headings."""
    shown = (f"{x:.3g}" if isinstance(x, float) else f"{x}" for x in values)
    return " ".join(f"{x:>{width}}" for x, width in zip(shown, COLUMNS.values(), strict=True))


def main(  # noqa: PLR0913  # one parameter an option
    trace: Annotated[str, typer.Option(help="A recording, or `calibrated`.")],
    policy: Annotated[
        list[Policy] | None, typer.Option(help="Repeat it to compare. Default: as recorded.")
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            help="Hot rows per request and pool, on average; repeat it. Default: as recorded."
        ),
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(min=0, help="Proposals per step. Default: as recorded.")
    ] = None,
    accept_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per step, if not as recorded: half of the queries."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Calibrated: how many.")] = 2,
    k: Annotated[int, typer.Option(min=1, help="Calibrated: rows per selection.")] = 2048,
    history: Annotated[int, typer.Option(min=1, help="Calibrated: prompt length.")] = 100_000,
    steps: Annotated[int, typer.Option(min=1, help="Calibrated: decode steps.")] = 50,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Say what policies fetch for recorded or calibrated selections."""
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    try:
        sizes = Calibrated(k=k, history=history, steps=steps, requests=requests)
        cfg, play = source(trace, sizes, draft_length, accept_length)
        typer.echo(line(COLUMNS), err=True)
        for each in policy or [cfg.policy]:
            for hot_rows in budget or [cfg.hot_rows]:
                mine = dataclasses.replace(cfg, policy=each, hot_rows=hot_rows)
                rows.append(figures(mine, replay(mine, play)))
                typer.echo(line(rows[-1].values()), err=True)  # the next one may take minutes
    except UserError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        raise typer.Exit(2) from None
    write({"bench": "simulate", **environment(), "trace": trace, "rows": rows}, json)


if __name__ == "__main__":
    typer.run(main)
