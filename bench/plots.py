"""Pictures from results: `python -m bench.plots`, or with files of `dhisparse serve --json`.

With `--decode-gpu` and a file of `bench.decode_gpu`, its pictures, beside it.

Needs the `bench` extra.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, NamedTuple

import matplotlib
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.decode_plots import COLOURS, decode_gpu
from bench.record import RESULTS

DRAFT_COLOURS = ("#7570b3", "#e7298a", "#66a61e")


def load_sweep() -> None:
    """Fetched share against the load, a line per policy."""
    path = RESULTS / "cpu" / "load_sweep.json"
    rows = json.loads(path.read_text())["rows"]
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    for policy, colour in COLOURS.items():
        mine = [row for row in rows if row["policy"] == policy]
        share = [100 * row["fetched_share"] for row in mine]
        memory = mine[0]["hot_bytes"] / 2**20
        label = f"{policy} ({memory:.0f} MiB hot)"
        axes.plot([row["load"] for row in mine], share, "o-", color=colour, label=label)
    axes.set_xlabel("requests at the same time")
    axes.set_ylabel("selected rows fetched\nfrom host memory, %")
    axes.set_ylim(bottom=-1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"))


class Line(NamedTuple):
    """A run over time.

    Attributes:
        label: its name in the legend.
        colour: of its lines.
        time: of every sample.
        share: fetched rows as a part of the selected ones, 0 to 1.
        requests: how many run.
        waiting: how many wait; empty where nobody ever does.
    """

    label: str
    colour: str
    time: list[float]
    share: list[float]
    requests: list[int]
    waiting: list[int]


def load_step(path: Path) -> None:
    """Fetched share over time while the load goes up and down, simulated or served."""
    document = json.loads(path.read_text())
    lines: list[Line] = []
    for policy in ("fixed", "adaptive"):
        series = document["series"][policy]
        time = [float(step) for step in range(len(series["requests"]))]
        colour = COLOURS[policy]
        lines.append(Line(policy, colour, time, series["fetched_share"], series["requests"], []))
    over_time(lines, "steps", path.with_suffix(".png"), document["summary"].get("fixed_at_floor"))


def served(paths: list[Path], out: Path) -> None:
    """The same from what `dhisparse serve --json` wrote, a line per run."""
    lines: list[Line] = []
    colours = itertools.cycle(DRAFT_COLOURS)
    for path in paths:
        document = json.loads(path.read_text())
        series = document["series"]
        column = lambda name, series=series: [sample[name] for sample in series]
        draft = "" if document["draft"] == "none" else f" + {document['draft']}"
        lines.append(
            Line(
                label=f"{document['policy']}{draft}",
                colour=next(colours) if draft else COLOURS[document["policy"]],
                time=column("seconds"),
                share=column("fetched_share"),
                requests=column("running"),
                waiting=column("waiting"),
            )
        )
    over_time(lines, "seconds", out)


def over_time(lines: list[Line], unit: str, path: Path, floor: float | None = None) -> None:
    """Draw fetched shares, and the load below them.

    Args:
        lines: the runs.
        unit: of their time.
        path: where the picture goes.
        floor: share of `fixed` with the least budget, as a dotted line; None for no line.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.4), dpi=150, sharex=True, height_ratios=(3, 1)
    )
    for line in lines:
        share = [100 * share for share in line.share]
        above.plot(line.time, share, color=line.colour, label=line.label, linewidth=1)
        below.step(line.time, line.requests, color=line.colour, linewidth=1)
        if any(line.waiting):
            below.step(line.time, line.waiting, color=line.colour, linewidth=0.8, linestyle=":")
    if floor is not None:
        above.axhline(100 * floor, color=COLOURS["resident"], linewidth=0.8, linestyle=":")
        above.annotate("fixed at the floor", (0, 100 * floor), va="bottom", fontsize=8)
    above.set_ylabel("selected rows fetched\nfrom host memory, %")
    waiting = any(any(line.waiting) for line in lines)
    below.set_ylabel("requests\n(dotted: waiting)" if waiting else "requests")
    below.set_xlabel(unit)
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path)


def main(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="What `dhisparse serve --json` wrote. Default: committed results."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture of these files.")] = Path("serve.png"),
    decode: Annotated[
        Path | None, typer.Option("--decode-gpu", help="A result of bench.decode_gpu.")
    ] = None,
) -> None:
    """Draw the committed results, or runs of `dhisparse serve`."""
    if decode:
        decode_gpu(decode)
        return
    if files:
        served(files, out)
        return
    load_sweep()
    for path in (RESULTS / "load_step.json", RESULTS / "h200" / "served_step.json"):
        if path.exists():
            load_step(path)


if __name__ == "__main__":
    typer.run(main)
