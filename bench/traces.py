"""Calibrated selection traces: which K positions a sparse-attention model selects, step by step.

Model. The positions of the history lie in a stack, the most recently selected on top. A step
selects its own, new position and K - 1 positions at distinct depths of the stack; all of them move
to the top, in random order. How the depths are spread is the whole model (`Locality`): a piecewise
uniform density down to 4 K, and a power law from there over the rest of the history. A cache of B
slots that drops the least recently selected position misses exactly what lies deeper than B, so the
shares are an LRU miss curve; FIFO, random and Belady follow from how positions move.

Source of the calibration: the cache curve that HiSparse published for GLM-5.1 with K = 2048, misses
in share of the selected rows. LRU .30 with K slots, .134 with 2 K, .067 with 4 K; FIFO .172, random
.161 and Belady .082 with 2 K. The densities between these depths are not published. With flat ones
random replacement misses .176, with those of a power law through the points Belady misses .075;
`GLM_5_1` lies halfway.

T verify queries at consecutive positions select as T consecutive steps do (`verify_queries`).
What the model does not know: where in the text a position lies, so neighbours are not selected
together, and whether layers agree.

`python -m bench.traces` prints the curve of the model beside the published one.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from bench.caches import POLICIES, simulate
from bench.record import environment, write
from dhisparse_jax.configs.workload import EDGES, EXPONENT, SHARES

TAIL_BANDS = 12
"""The power law is drawn as so many uniform bands, each deeper one larger by the same factor."""


@dataclasses.dataclass(frozen=True)
class Locality:
    """How a selection is spread over the recency stack.

    Attributes:
        edges: where each band ends, in units of K, ascending; the first starts at depth 0.
        shares: share of the selection that falls into each band, uniformly.
        exponent: the rest falls deeper than the last edge; the share deeper than x K goes with
            `x**-exponent`, down to the oldest position.
    """

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    exponent: float

    def with_misses(self, share: float) -> "Locality":
        """The same shape, but a cache of the first band (K slots) misses `share` of a selection.

        `GLM_5_1.with_misses(0.1)` has a third of the misses of GLM_5_1 at every budget.
        """
        factor = share / (1 - self.shares[0])
        deeper = tuple(factor * each for each in self.shares[1:])
        return dataclasses.replace(self, shares=(1 - share, *deeper))

    def bands(self, k: int, history: int) -> tuple[Int[np.ndarray, " n"], np.ndarray]:
        """Where each band ends, as a stack depth, and the share of each.

        Raises:
            ValueError: if the history does not reach beyond the last edge, or a band would have to
                give more positions than it has.
        """
        if history <= self.edges[-1] * k:
            least = f"more than {self.edges[-1]:g} K positions"
            raise ValueError(f"a history of {history} is too short for K = {k}: it takes {least}")
        tail = np.geomspace(self.edges[-1], history / k, TAIL_BANDS + 1)
        mass = -np.diff(tail**-self.exponent)
        mass *= (1 - sum(self.shares)) / mass.sum()
        ends = np.round(k * np.concatenate([self.edges, tail[1:]])).astype(np.int64)
        shares = np.concatenate([self.shares, mass])
        if np.any(shares * k > np.diff(ends, prepend=0)):
            raise ValueError(f"{self} selects more positions of a band than there are")
        return ends, shares

    def budget(self, misses: float, k: int, history: int) -> int:
        """Slots of an LRU cache that misses this share of a selection: all deeper than them."""
        ends, shares = self.bands(k, history)
        deeper = 1 - np.cumsum(np.append(0, shares))
        return round(float(np.interp(-misses, -deeper, np.append(0, ends))))


GLM_5_1 = Locality(edges=EDGES, shares=SHARES, exponent=EXPONENT)
"""Calibrated to GLM-5.1, K = 2048; see the module."""


class Trace(NamedTuple):
    """Selections of one request.

    Attributes:
        selection: int32, step s selects K distinct positions out of 0 .. history + s, in no order
            of position; its own position, history + s, comes first (with a record for several
            positions, the one that it completes).
        stack: int32 positions 0 .. history - 1 before the first step, the most recent on top. The
            first B of them are what an LRU cache of B slots holds, in steady state.
    """

    selection: Int[np.ndarray, "steps K"]
    stack: Int[np.ndarray, " history"]


def trace(
    locality: Locality = GLM_5_1,
    *,
    k: int,
    history: int,
    steps: int,
    rate: int = 1,
    seed: int | Sequence[int] = 0,
) -> Trace:
    """Selections of `steps` decode steps after a prompt of `history` positions.

    Where a record stands for `rate` positions, `history` counts records, and a new one comes with
    every so many steps; the others select K of those that there are.

    Raises:
        ValueError: if the history is too short for the model.
    """
    rng = np.random.default_rng(seed)
    first = stack = rng.permutation(history).astype(np.int32)
    ends, shares = locality.bands(k, history)
    selection = np.empty((steps, k), np.int32)
    for step in range(steps):
        new = int((step + 1) % rate == 0)
        depths = _depths(rng, np.append(ends[:-1], len(stack)), shares, k - new)
        selection[step, :new] = history + step // rate
        selection[step, new:] = rng.permutation(stack[depths])
        rest = np.ones(len(stack), np.bool_)
        rest[depths] = False
        stack = np.concatenate([selection[step], stack[rest]])
    return Trace(selection, first)


def _depths(
    rng: np.random.Generator, ends: Int[np.ndarray, " n"], shares: np.ndarray, count: int
) -> Int[np.ndarray, " count"]:
    """Distinct stack depths, each band's share of them.

    A band gets a whole number of depths, rounded so that its mean is right: with shares .7 .2 .1 of
    4 and u = .5 the ends 2.8 3.6 4 become 3 4 4, so the bands get 3 1 0.
    """
    last = np.floor(np.cumsum(shares) * count + rng.random()).astype(np.int64)
    last[-1] = count
    bands = zip(np.append(0, ends[:-1]), ends, np.diff(last, prepend=0), strict=True)
    draw = lambda size, number: rng.choice(size, number, replace=False, shuffle=False)
    return np.concatenate([start + draw(end - start, number) for start, end, number in bands])


def verify_queries(
    selection: Int[np.ndarray, "steps K"], queries: int, advance: int = 1
) -> Int[np.ndarray, "n T K"]:
    """What T queries at consecutive positions select, for steps that accept `advance` tokens each.

    The queries of step n are the decode steps `n * advance .. n * advance + T - 1`. With `advance`
    below T a rejected query is repeated as it was, though a real one would have had another token:
    then the misses are a lower bound. `advance` = T is the upper one.
    """
    windows = np.lib.stride_tricks.sliding_window_view(selection, queries, axis=0)
    return windows[::advance].swapaxes(1, 2)


def unions(windows: Int[np.ndarray, "n T K"]) -> list[Int[np.ndarray, " u"]]:
    """The distinct positions that each step's queries select, ascending."""
    return [np.unique(window) for window in windows]


class Figure(NamedTuple):
    """One figure of the curve, as published and as the model has it."""

    name: str
    published: float
    model: float

    @property
    def deviation(self) -> float:
        """Relative deviation from the published figure."""
        return self.model / self.published - 1


PUBLISHED_MISSES = {
    ("lru", 1): 0.30,
    ("lru", 2): 0.134,
    ("lru", 4): 0.067,
    ("fifo", 2): 0.172,
    ("random", 2): 0.161,
    ("belady", 2): 0.082,
}
"""Misses in share of the selected rows, by policy and budget in units of K."""

EXPECTED_UNIONS = {2: 1.30, 4: 1.75, 8: 2.33, 16: 3.2}
"""Distinct rows of T queries in units of K: what the design plans with."""


def figures(sample: Trace) -> list[Figure]:
    """The cache curve and the union sizes of a trace.

    The misses of the middle third count: before, FIFO and random still forget the first content;
    after, Belady would know that nothing comes.
    """
    selection, stack = sample
    steps, k = selection.shape
    middle = slice(steps // 3, 2 * steps // 3)
    rows = []
    for (policy, budget), published in PUBLISHED_MISSES.items():
        missed = simulate(list(selection), POLICIES[policy], stack[: budget * k], len(stack))
        share = np.mean([len(each) for each in missed[middle]]) / k
        rows.append(Figure(f"{policy} {budget} K", published, float(share)))
    for queries, expected in EXPECTED_UNIONS.items():
        sizes = [len(each) for each in unions(verify_queries(selection, queries, queries))]
        rows.append(Figure(f"union T {queries}", expected, float(np.mean(sizes)) / k))
    return rows


def main(
    k: Annotated[int, typer.Option(help="Selected positions per step.")] = 2048,
    history: Annotated[int, typer.Option(help="Positions before the first step.")] = 100_000,
    steps: Annotated[int, typer.Option(help="Decode steps.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Print the cache curve of the model beside the published one."""
    rows = figures(trace(k=k, history=history, steps=steps, seed=seed))
    table = Table("figure", "published", "model", "deviation", title="misses / K, unions / K")
    for row in rows:
        numbers = f"{row.published:.3f}", f"{row.model:.3f}", f"{row.deviation:+.1%}"
        table.add_row(row.name, *numbers)
    Console(stderr=True).print(table)
    results = [{**row._asdict(), "deviation": row.deviation} for row in rows]
    sizes = {"k": k, "history": history, "steps": steps, "seed": seed}
    write({"bench": "traces", **environment(), **sizes, "rows": results}, json)


if __name__ == "__main__":
    typer.run(main)
