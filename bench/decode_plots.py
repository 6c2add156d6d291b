"""Pictures of what `bench.decode_gpu` wrote, for `bench.plots`."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"resident": "#7f7f7f", "fixed": "#d95f02", "adaptive": "#1b9e77"}
MARKERS = {"": "o", "dflash2": "s", "dspark": "^"}
STYLES = {"": "-", "dflash2": "--", "dspark": ":"}

SMALLEST = 0.02
"""Stages that take less than this share of every step are drawn as one."""


def decode_gpu(path: Path) -> None:
    """Draw output against load, steps by stage and over time, and shares of floors, beside it."""
    document = json.loads(path.read_text())
    draws = {"sweep": _sweep, "stages": _stages, "floor": _floor}
    if any(cell.get("timeline_us") for cell in document["cells"].values()):
        draws["timeline"] = _timeline
    for name, draw in draws.items():
        figure = draw(document)
        figure.tight_layout()
        figure.savefig(path.with_name(f"{path.stem}_{name}.png"))
        plt.close(figure)


def _sweep(document: dict[str, Any]) -> Any:  # noqa: ANN401  # matplotlib has no types
    """Output of the GPU against the requests on it, a line per cell."""
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150)
    for name in dict.fromkeys(row["cell"] for row in document["sweep"]):
        rows = [row for row in document["sweep"] if row["cell"] == name]
        rows.sort(key=lambda row: row["requests"])
        policy, _, draft = name.partition("_")
        axes.plot(
            [row["requests"] for row in rows],
            [row["tokens_per_s"] for row in rows],
            linestyle=STYLES[draft],
            marker=MARKERS[draft],
            color=COLOURS[policy],
            label=_label(name),
        )
    axes.set_xlabel("requests on the GPU (those that do not fit wait)")
    axes.set_ylabel("output tokens/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _finish(axes)
    return figure


def _stages(document: dict[str, Any]) -> Any:  # noqa: ANN401
    """GPU time of a step by stage, a bar per cell, with the whole step as a line."""
    cells = document["cells"]
    shown = _large([cell["stages_ms"] for cell in cells.values()])
    figure, axes = plt.subplots(figsize=(8, 4), dpi=150)
    names = [_label(name) for name in cells]
    left = [0.0] * len(cells)
    colour = plt.get_cmap("tab20")
    for number, stage in enumerate([*shown, "smaller ones"]):
        times = [_time(cell["stages_ms"], stage, shown) for cell in cells.values()]
        axes.barh(names, times, left=left, color=colour(number % 20), label=stage)
        left = [start + time for start, time in zip(left, times, strict=True)]
    steps = [cell["step_ms"] for cell in cells.values()]
    axes.plot(steps, names, "k|", markersize=22, label="the step")
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step")
    _finish(axes, ncols=2)
    return figure


def _floor(document: dict[str, Any]) -> Any:  # noqa: ANN401
    """Share of the floor that the step and its stages reach, a group of bars per cell."""
    cells = document["cells"]
    stages = list(dict.fromkeys(stage for cell in cells.values() for stage in cell["reached"]))
    figure, axes = plt.subplots(figsize=(8, 4), dpi=150)
    width = 0.8 / max(1, len(cells))
    for number, (name, cell) in enumerate(cells.items()):
        share = [100 / cell["floor_ratio"], *(100 * cell["reached"].get(s, 0.0) for s in stages)]
        place = [at + number * width for at in range(len(share))]
        policy, _, draft = name.partition("_")
        hatch = "//" if draft else None
        axes.bar(place, share, width, color=COLOURS[policy], hatch=hatch, label=_label(name))
    middle = [at + 0.4 - width / 2 for at in range(len(stages) + 1)]
    axes.set_xticks(middle, ["the step", *stages], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("floor in share of the time, %")
    _finish(axes)
    return figure


def _timeline(document: dict[str, Any]) -> Any:  # noqa: ANN401
    """Two selection groups of the last cells that were profiled, a line per stage."""
    cells = {name: cell for name, cell in document["cells"].items() if cell.get("timeline_us")}
    shown = list(cells)[-2:]
    figure, rows = plt.subplots(
        len(shown), figsize=(9, 3 * len(shown)), dpi=150, sharex=True, squeeze=False
    )
    colour = plt.get_cmap("tab20")
    order = dict.fromkeys(stage for name in shown for stage, *_ in cells[name]["timeline_us"])
    for name, axes in zip(shown, rows[:, 0], strict=True):
        for number, stage in enumerate(order):
            bars = [bar for each, *bar in cells[name]["timeline_us"] if each == stage]
            axes.broken_barh(bars, (number - 0.4, 0.8), color=colour(number % 20))
        axes.set_yticks(range(len(order)), list(order), fontsize=7)
        axes.invert_yaxis()
        axes.set_title(_label(name), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1, 0].set_xlabel("us")
    return figure


def _large(stages: list[dict[str, float]]) -> list[str]:
    """Stages that take a visible share of some step, longest first."""
    longest: dict[str, float] = {}
    for each in stages:
        whole = sum(each.values()) or 1.0
        for stage, time in each.items():
            if time >= SMALLEST * whole:
                longest[stage] = max(longest.get(stage, 0.0), time)
    return sorted(longest, key=longest.__getitem__, reverse=True)


def _time(stages: dict[str, float], stage: str, shown: list[str]) -> float:
    if stage in shown:
        return stages.get(stage, 0.0)
    return sum(time for name, time in stages.items() if name not in shown)


def _label(name: str) -> str:
    return name.replace("_", " + ")


def _finish(axes: Any, ncols: int = 1) -> None:  # noqa: ANN401
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=ncols)
