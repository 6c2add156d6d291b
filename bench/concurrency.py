"""How many requests can run at once in the same memory, at the same time per output token.

Host memory and the hot slots of the device are the same for all: room for `--rows` requests of
`fixed` with 2 K slots each in every pool, which is a small part of their histories. `fixed` has
that budget at every load, so it takes in no more. `adaptive` has the same slots in total, and a
floor of one selection, or less: what a step needs beyond it passes through staging. A draft gives
several tokens a step, and so the time for more requests.

For each setting and load, an engine with so many rows: distinct texts run from the moment when all
of them decode until the first has ended. The time per token of a request is that of its tokens in
between, and p95 is over requests. A load is sustained if p95 is within the bound; without
`--tpot-ms`, that is p95 of `fixed` with all requests that it takes in. Loads go up while the bound
is held, or down until it is.

What is not the same for all stands in every row: staging and tails, index keys, and what the draft
keeps.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.load_sweep import pieces
from bench.record import environment, save, write
from dhisparse_jax.cli.options import BUNDLED_DRAFT, BUNDLED_MODEL, NO_DRAFT, DraftOptions
from dhisparse_jax.cli.session import default_dispatch_steps, load_draft
from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Acceptance, Finished, NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.replay import warm_up
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models import registry
from dhisparse_jax.speculation.protocol import Draft

BAR = 2.0
"""Requests that `adaptive` with a draft is to sustain, in units of those of `fixed` without."""

FIXED_SELECTIONS = 2
"""Budget of `fixed` in selections, as HiSparse has it."""

SETTLING = 6
"""Steps with all requests before the time begins to count."""

KINDS = ("hot", "host", "tail", "staging", "index", "draft")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        name: in the result.
        policy: how hot slots are shared out.
        draft: by name.
        loads: loads to try, ascending, in units of the rows of `fixed`.
        first: the load that is tried first.
    """

    name: str
    policy: Policy
    draft: str
    loads: tuple[float, ...]
    first: float


FIXED = Setting("fixed", Policy.FIXED, NO_DRAFT, (0.25, 0.5, 0.75, 1.0), 1.0)
DRAFTED = Setting("adaptive + draft", Policy.ADAPTIVE, BUNDLED_DRAFT, (1.0, 2.0, 3.0, 4.0), 2.0)
ADAPTIVE = Setting("adaptive", Policy.ADAPTIVE, NO_DRAFT, (0.5, 1.0, 1.5, 2.0), 1.5)
SETTINGS = (FIXED, DRAFTED, ADAPTIVE)
"""In the order in which they run: most of the time of each load is compilation."""


def main(
    rows: Annotated[int, typer.Option(help="Requests of `fixed` that memory is for.")] = 16,
    tpot_ms: Annotated[float | None, typer.Option(help="The bound; default: see above.")] = None,
    prompt_bytes: Annotated[int, typer.Option(help="Prompt length, in bytes.")] = 2000,
    new_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 512,
    dtype: Annotated[str, typer.Option(help="What the model computes in.")] = "float32",
    draft_length: Annotated[str | None, typer.Option(help="Tokens that are proposed.")] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Sizes for a CPU, and one load of each setting.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Find how many requests each setting sustains."""
    if small:
        rows, prompt_bytes, new_tokens = 2, 400, 120
    loaded = registry.load(BUNDLED_MODEL, dtype)
    settings = [dataclasses.replace(it, loads=(it.first,)) if small else it for it in SETTINGS]
    most = int(rows * max(setting.loads[-1] for setting in settings))
    requests = [
        Request(name=name, prompt=loaded.tokenizer.encode(text), max_new_tokens=new_tokens)
        for name, text in pieces(most, prompt_bytes)
    ]
    bench = Bench(loaded, settings, requests, rows, draft_length)
    about = {"bench": "concurrency", **environment(), "dtype": dtype}
    done: list[Row] = []
    for row in bench.rows(None if tpot_ms is None else tpot_ms / 1e3):
        done.append(row)
        save(about | {"rows": done, "summary": summary(done)}, json)
    Console(stderr=True).print(table(done))
    write(about | {"rows": done, "summary": summary(done)}, json)


class Bench:
    """Runs loads of all settings in the same memory.

    Args:
        loaded: the model.
        settings: what is compared, `fixed` first.
        requests: as many as the largest load has.
        rows: requests of `fixed` that the memory is for.
        draft_length: proposed tokens; None: as many as the draft can.
    """

    def __init__(
        self,
        loaded: registry.LoadedModel,
        settings: list[Setting],
        requests: list[Request],
        rows: int,
        draft_length: str | None = None,
    ) -> None:
        self._loaded, self._settings = loaded, settings
        self._requests, self._rows = requests, rows
        self._draft_length = draft_length
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        page = HierarchyConfig.host_page
        slots = FIXED_SELECTIONS * loaded.model.geometry.top_k
        self._capacity = min(longest + 16, loaded.context)  # drafts write a block beyond the end
        self._hot_slots = rows * slots  # per pool, of all requests together, as are the pages
        self._host_pages = len(requests) * -(-self._capacity // page)

    def rows(self, bound: float | None) -> Iterator[Row]:
        """A row for every load that is tried, and whether it holds the bound."""
        for setting in self._settings:
            tried: dict[float, Row] = {}
            for load in ladder(setting, tried):
                row = tried[load] = self._row(setting, round(self._rows * load))
                if bound is None:
                    bound = row["tpot_p95_ms"] / 1e3
                row |= {"bound_ms": 1e3 * bound, "holds": row["tpot_p95_ms"] <= 1e3 * bound}
                yield row

    def _row(self, setting: Setting, load: int) -> Row:
        options = DraftOptions.of(BUNDLED_MODEL, setting.draft, self._draft_length)
        if setting.draft == NO_DRAFT:
            options = DraftOptions()
        engine = self._engine(setting, load, load_draft(options, self._loaded))
        begin = time.perf_counter()
        warm_up(engine)
        compiled = time.perf_counter() - begin
        measured = measure(engine, self._requests[:load])
        sizes = engine.sizes
        return {
            "setting": setting.name,
            "load": load,
            "proposals": engine.drafter.length,
            "hot_slots_per_request": engine.cfg.hot_slots(0),
            **measured,
            **{f"{kind}_bytes": getattr(sizes, f"{kind}_bytes") for kind in KINDS},
            "compile_s": compiled,
        }

    def _engine(self, setting: Setting, load: int, draft: Draft) -> Engine:
        """Of `fixed`, every request has its budget; of `adaptive`, all together the whole."""
        slots = FIXED_SELECTIONS * self._loaded.model.geometry.top_k
        share = slots if setting.policy is Policy.FIXED else self._hot_slots // load
        queries = draft.drafter.length + 1
        cfg = HierarchyConfig(
            geometry=self._loaded.model.geometry,
            policy=setting.policy,
            requests=load,
            capacity=self._capacity,
            queries=queries,
            hot_rows=whole_pages(share),
            tail=usual_tail(queries),
            host_pages=self._host_pages,
        )
        steps = default_dispatch_steps(self._loaded.params)
        return Engine(self._loaded.model, self._loaded.params, cfg, draft=draft, steps=steps)


def whole_pages(slots: int) -> int:
    """Slots in whole pages of 16, where there are so many."""
    return slots // 16 * 16 or slots


def ladder(setting: Setting, tried: dict[float, Row]) -> Iterator[float]:
    """The loads to try, one after another: up while the bound is held, or down until it is.

    Args:
        setting: whose loads.
        tried: what came of those before, which the caller fills in.
    """
    place = setting.loads.index(setting.first)
    yield setting.first
    up = tried[setting.first]["holds"]
    for load in setting.loads[place + 1 :] if up else setting.loads[:place][::-1]:
        yield load
        if tried[load]["holds"] != up:
            return


def measure(engine: Engine, requests: list[Request]) -> Row:
    """Run the requests until the first one has ended, and time them once all of them decode."""
    numbers = [engine.submit(request) for request in requests]
    tokens = dict.fromkeys(numbers, 0)
    last = dict.fromkeys(numbers, 0.0)
    metrics, acceptance, steps = StepMetrics(), Acceptance(), 0
    begin: float | None = None
    counts = False  # whether the dispatch that lands came after `begin`
    before: object = None
    for event in _until_one_ends(engine):
        now = time.perf_counter()
        match event:
            case StepDone():
                steps += engine.counts[1] == 0
                counts = counts or (begin is not None and not isinstance(before, StepDone))
                if counts:
                    metrics += event.metrics
                    acceptance += event.acceptance
                elif begin is None and steps > SETTLING:
                    begin = now
            case NewTokens(number, new) if counts:
                tokens[number] += len(new)
                last[number] = now
        before = event
    for number in numbers:
        engine.cancel(number)
    list(engine.advance())
    assert begin is not None, "too few tokens per request to time them"
    times = [1e3 * (last[number] - begin) / max(tokens[number], 1) for number in numbers]
    middle, tail = np.percentile(np.asarray(times), (50, 95))
    return {
        "tpot_p50_ms": float(middle),
        "tpot_p95_ms": float(tail),
        "tokens_per_s": sum(tokens.values()) / (max(last.values()) - begin),
        "steps": steps - SETTLING,
        "accept_length": acceptance.length,
        "fetched_share": metrics.fetched_rows / max(metrics.selected_rows, 1),
        "host_bytes_per_token": metrics.host_bytes_read / max(sum(tokens.values()), 1),
    }


def _until_one_ends(engine: Engine) -> Iterator[object]:
    while True:
        for event in engine.advance():
            if isinstance(event, Finished):
                return
            yield event


def summary(rows: list[Row]) -> Row:
    """The largest load that each setting sustains; 0 where none was."""
    sustained = {setting.name: 0 for setting in SETTINGS}
    for row in rows:
        if row["holds"]:
            sustained[row["setting"]] = max(sustained[row["setting"]], row["load"])
    ratio = sustained[DRAFTED.name] / max(sustained[FIXED.name], 1)
    return {
        "bound_ms": rows[-1]["bound_ms"],
        "sustained": sustained,
        "ratio": ratio,
        "bar": BAR,
        "holds": ratio >= BAR,
    }


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    bound = rows[-1]["bound_ms"]
    out = Table(title=f"requests at once; time per token at p95 within {bound:.2f} ms")
    out.add_column("setting")
    for name in ("requests", "p50 ms", "p95 ms", "tokens/s", "accept", "fetched", "holds"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(
            row["setting"],
            str(row["load"]),
            f"{row['tpot_p50_ms']:.2f}",
            f"{row['tpot_p95_ms']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['accept_length']:.2f}",
            f"{row['fetched_share']:.1%}",
            "yes" if row["holds"] else "no",
        )
    return out


if __name__ == "__main__":
    typer.run(main)
