"""What a decode benchmark says: what is executed and what is modelled, figures, ratios."""

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.replayed import PUBLISHED_SURVIVAL, PUBLISHED_TOKENS_PER_STEP, tokens_per_step
from bench.roofline import Floors
from bench.shard_setup import Setup

console = Console(stderr=True)


def said(
    setup: Setup, requests: int, context: int, layers: int | None, gpus: int, floors: Floors
) -> dict[str, Any]:
    """What every result says at its top."""
    config = setup.model.config
    return {
        "model": {
            "layers": config.num_layers,
            "of": "all layers" if layers is None else f"the first {layers}",
            "experts_here": setup.model.experts,
            "experts": config.num_experts,
            "gpus": gpus,
            "groups": [len(group) for group in config.groups],
        },
        "floors": floors._asdict(),
        "executed": [
            f"decode_step of the library, {requests} requests x {context} positions, all kernels",
            f"{config.num_layers} layers: attention, indexer with top-K, norms, router, shared "
            f"expert, {setup.model.experts} of {config.num_experts} experts, head; weights random, "
            "fp8 with a scale per output channel, bfloat16 products",
            "the draft model, with random weights, its ring full",
            "host pools of full size in pinned memory; retrieval, backup, adaptation",
        ],
        "modelled": [
            "selections: calibrated traces (bench.traces) in place of the indexer's, whose scores "
            "and top-K are computed all the same",
            f"experts: {gpus} GPUs' tokens as uniform picks, so that each expert has the load that "
            "they send; no all-to-all",
            f"acceptance: survival by position {PUBLISHED_SURVIVAL}, "
            f"{tokens_per_step(PUBLISHED_SURVIVAL):.2f} tokens per step (published for a DSpark of "
            f"GLM-5.2; the mean published beside it is {PUBLISHED_TOKENS_PER_STEP})",
            "sizes of the draft, as far as they are not published (bench.shard_setup.draft_config)",
            "one host per GPU: the link is not shared",
        ],
    }


def ratios(cells: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of each cell, in units of `fixed` and of `adaptive`."""
    found = {}
    for base in ("resident", "fixed", "adaptive"):
        if base in cells:
            for name, cell in cells.items():
                found[f"{name}/{base}"] = cell["tokens_per_s"] / cells[base]["tokens_per_s"]
    return found


def tell(name: str, figures: dict[str, Any]) -> None:
    """Print what a cell gave."""
    console.print(
        f"[bold]{name}[/]: {figures['tokens_per_s']:.1f} tokens/s, step "
        f"{figures['step_ms']:.2f} ms (floor {figures['floor_ms']:.2f}), "
        f"TPOT {figures['tpot_ms']:.2f} ms, fetched {figures['fetched_share']:.2%}, "
        f"link {figures['link_gb_per_step']:.3f} GB/step"
    )
    console.print({k: round(v, 3) for k, v in figures["stages_ms"].items()})


def table_of(cells: dict[str, Any]) -> Table:
    """All cells beside each other."""
    table = Table(title="One decode GPU")
    for name in ("cell", "requests", "tokens/s", "TPOT ms", "step ms", "floor ms", "x", "fetched"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for name, each in cells.items():
        table.add_row(
            name,
            str(each["requests"]),
            f"{each['tokens_per_s']:.1f}",
            f"{each['tpot_ms']:.2f}",
            f"{each['step_ms']:.2f}",
            f"{each['floor_ms']:.2f}",
            f"{each['floor_ratio']:.2f}",
            f"{each['fetched_share']:.2%}",
        )
    return table
