"""What a decode benchmark says: what is executed and what is modelled, figures, ratios."""

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.shard_session import Asked, Planned, draft_of
from dhisparse_jax.configs.workload import tokens_per_step
from dhisparse_jax.engine.rates import Floors

console = Console(stderr=True)


def said(asked: Asked, cells: list[Planned], floors: Floors) -> dict[str, Any]:
    """What every result says at its top."""
    setup = cells[0].setup
    config, held = setup.model.config, asked.host_requests
    own = setup.model.said(asked.gpus)
    shared = f"; beyond {held} requests, they share host pages" if held < max(asked.loads) else ""
    return {
        "model": {
            "layers": config.num_layers,
            "of": "all layers" if asked.layers is None else f"the first {asked.layers}",
            "experts_here": setup.model.experts,
            "experts": config.num_experts,
            "gpus": asked.gpus,
            "groups": [len(group) for group in config.groups],
        },
        "floors": floors._asdict(),
        "executed": [
            f"decode_step of the library, all kernels, requests of {asked.context} positions",
            *own.executed,
            "the draft model, with random weights, its ring full",
            f"host pools of {held} requests in pinned memory{shared}",
            "retrieval, backup and adaptation",
        ],
        "modelled": [
            "selections: calibrated traces (bench.traces) in place of the indexer's, whose scores "
            "and top-K are computed all the same",
            f"experts: {asked.gpus} GPUs' tokens as uniform picks, so each expert has the load "
            "that they send; no all-to-all",
            f"acceptance: survival by position {[round(x, 3) for x in asked.survival]}, "
            f"{tokens_per_step(asked.survival):.2f} tokens per step",
            "tokens_per_s_at_published_mean: the measured step, with "
            f"{setup.model.published_tokens} tokens; not measured",
            *own.modelled,
            "one host per GPU: the link is not shared",
        ],
    }


def ratios(cells: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of each cell, in units of those without a draft or with the same one."""
    return {
        f"{name}/{base}": cell["tokens_per_s"] / cells[base]["tokens_per_s"]
        for base in cells
        for name, cell in cells.items()
        if draft_of(base) in ("none", draft_of(name))
    }


def prepared(name: str, seconds: float) -> None:
    """Print that something is done which all cells need."""
    console.print(f"{name}: {seconds:.0f} s")


def tell(name: str, figures: dict[str, Any]) -> None:
    """Print what a cell gave."""
    console.print(
        f"[bold]{name}[/]: {figures['tokens_per_s']:.1f} tokens/s, step "
        f"{figures['step_ms']:.2f} ms (floor {figures['floor_ms']:.2f}), "
        f"TPOT {figures['tpot_ms']:.2f} ms, fetched {figures['fetched_share']:.2%}, "
        f"link {figures['link_gb_per_step']:.3f} GB/step"
    )
    console.print({k: round(v, 3) for k, v in figures["stages_ms"].items()})


def table_of(rows: list[dict[str, Any]]) -> Table:
    """All rows of a sweep beside each other."""
    table = Table(title="One decode GPU")
    table.add_column("cell")
    for name in ("requests", "running", "tokens/s", "TPOT ms", "step ms", "floor ms", "x"):
        table.add_column(name, justify="right")
    table.add_column("fetched", justify="right")
    for row in rows:
        table.add_row(
            row["cell"],
            str(row["requests"]),
            str(row["running"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['floor_ratio']:.2f}",
            f"{row['fetched_share']:.2%}",
        )
    return table
