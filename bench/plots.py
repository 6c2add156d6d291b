"""Pictures from committed results: `python -m bench.plots`. Needs the `bench` extra."""

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.record import RESULTS

COLOURS = {"resident": "#7f7f7f", "fixed": "#d95f02", "adaptive": "#1b9e77"}


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


if __name__ == "__main__":
    load_sweep()
