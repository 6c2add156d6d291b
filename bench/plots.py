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


def load_step() -> None:
    """Fetched share over time while the load goes up and down, and the load below it."""
    path = RESULTS / "load_step.json"
    document = json.loads(path.read_text())
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.4), dpi=150, sharex=True, height_ratios=(3, 1)
    )
    for policy in ("fixed", "adaptive"):
        series = document["series"][policy]
        share = [100 * share for share in series["fetched_share"]]
        above.plot(share, color=COLOURS[policy], label=policy, linewidth=1)
        below.step(range(len(share)), series["requests"], color=COLOURS[policy], linewidth=1)
    floor = 100 * document["summary"]["fixed_at_floor"]
    above.axhline(floor, color=COLOURS["resident"], linewidth=0.8, linestyle=":")
    above.annotate("fixed at the floor", (0, floor), va="bottom", fontsize=8)
    above.set_ylabel("selected rows fetched\nfrom host memory, %")
    below.set_ylabel("requests")
    below.set_xlabel("steps")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"))


if __name__ == "__main__":
    load_sweep()
    load_step()
