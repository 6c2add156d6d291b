"""What cells do at several loads: rows, and what each does within a bound on the time per token.

A row's `requests` are there at the same time; `running` of them fit into memory, and the others
wait. So output per second is that of those that run, and so is the time per output token: a request
that waits has not begun.
"""

from collections.abc import Mapping, Sequence
from typing import Any

KEPT = (
    "tokens_per_s",
    "tokens_per_s_at_published_mean",
    "tpot_ms",
    "step_ms",
    "floor_ms",
    "floor_ratio",
    "fetched_share",
    "hot_rows",
)
"""Figures of a cell that a row repeats."""

LOW_LOAD = 4
"""Up to so many requests, adaptive residency must cost next to nothing."""

Row = Mapping[str, Any]


def row_of(load: int, name: str, figures: Row) -> dict[str, Any]:
    """A cell at a load."""
    return {
        "cell": name,
        "requests": load,
        "running": figures["requests"],
        **{key: figures[key] for key in KEPT},
        "measured_over_expected": figures["expected"].get("measured_over_expected"),
    }


def bounded(rows: Sequence[Row], asked_ms: Sequence[float]) -> list[dict[str, Any]]:
    """The largest load and output of every cell within bounds on the time per output token.

    Bounds are those that are asked for, and what every cell has where its own output is largest.
    Loads between those measured are not guessed.
    """
    names = dict.fromkeys(row["cell"] for row in rows)
    own = {name: _best([row for row in rows if row["cell"] == name]) for name in names}
    bounds = [(f"{ms:g} ms", ms) for ms in asked_ms]
    bounds += [(f"{name} at its best", best["tpot_ms"]) for name, best in own.items()]
    return [
        {"bound": label, "tpot_ms": most, "cells": _within(rows, names, most)}
        for label, most in bounds
    ]


def _within(rows: Sequence[Row], names: Mapping[str, Any], most: float) -> dict[str, Any]:
    found = {}
    for name in names:
        mine = [row for row in rows if row["cell"] == name and row["tpot_ms"] <= most]
        if mine:
            found[name] = {
                "requests": max(row["running"] for row in mine),
                "tokens_per_s": _best(mine)["tokens_per_s"],
            }
    return found


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row["tokens_per_s"])


def compared_with_resident(rows: Sequence[Row]) -> dict[str, float]:
    """Output of adaptive cells at low load, in units of the resident one with the same draft."""
    at = {(row["cell"], row["requests"]): row for row in rows if row["requests"] <= LOW_LOAD}
    return {
        f"{name} at {load}": row["tokens_per_s"] / resident["tokens_per_s"]
        for (name, load), row in at.items()
        if name.startswith("adaptive")
        if (resident := at.get((name.replace("adaptive", "resident"), load)))
    }
