"""A run of the decode benchmark: which cells at which loads, compiled, over one set of weights."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from bench.replayed import selections
from bench.shard_cells import Cell
from bench.shard_compile import Compilers, Program, compile_step
from bench.shard_load import Loaded, load
from bench.shard_memory import fitted
from bench.shard_run import Common, Plan, run_cell
from bench.shard_setup import (
    HOST_PAGE,
    Setup,
    abstract_setup,
    capacity_of,
    host_requests,
    shard_of,
)
from bench.shard_state import host_pools, patterns
from dhisparse_jax.config import Policy
from dhisparse_jax.configs.gpus import Rates

SPARE_TRACES, MOST_TRACES = 16, 32
"""So many different texts are replayed, at least and at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run is asked for.

    Attributes:
        model: name of a preset.
        cells: names, such as `adaptive_dflash2`.
        loads: requests on this GPU at the same time, one load after the other.
        context: positions of each request when it starts.
        plan: how long each cell runs.
        layers: only so many; None: all.
        gpus: that share the experts.
        survival: acceptance profile of the drafts.
        device_bytes: of device memory.
        host_bytes: of pinned memory.
    """

    model: str
    cells: tuple[str, ...]
    loads: tuple[int, ...]
    context: int
    plan: Plan
    layers: int | None
    gpus: int
    survival: tuple[float, ...]
    device_bytes: float
    host_bytes: int

    @property
    def room(self) -> int:
        """Positions by which a request may grow."""
        return self.plan.total * 8 + 16

    def setup(self, draft: str, requests: int) -> Setup:
        """Shapes of everything at a load."""
        return abstract_setup(
            self.model,
            layers=self.layers,
            context=self.context,
            room=self.room,
            draft=draft,
            requests=requests,
            traces=min(MOST_TRACES, max(SPARE_TRACES, *self.loads)),
            gpus=self.gpus,
            host_pages=self.host_requests * (self.capacity // HOST_PAGE),
        )

    @property
    def capacity(self) -> int:
        """Positions of a request at most."""
        return capacity_of(self.context, self.room)

    @property
    def host_requests(self) -> int:
        """Requests whose histories host memory holds, at most as many as there will be."""
        model = shard_of(self.model, self.layers, self.gpus)
        return max(1, host_requests(model, self.capacity, max(self.loads), self.host_bytes))


class Planned(NamedTuple):
    """A cell at a load.

    Attributes:
        load: requests that there are; those beyond `cell.requests` wait.
        cell: as large as memory lets it be.
        setup: its shapes.
    """

    load: int
    cell: Cell
    setup: Setup


def draft_of(name: str) -> str:
    """`adaptive_dflash2` has the draft `dflash2`."""
    _, _, draft = name.partition("_")
    return draft or "none"


def planned(asked: Asked) -> list[Planned]:
    """All cells at all loads: one load after the other, those of one draft together."""
    found = [
        (draft_of(name), _sized(name, asked.setup(draft_of(name), load), load, asked), load)
        for load in asked.loads
        for name in asked.cells
    ]
    order = sorted(found, key=lambda each: (asked.loads.index(each[2]), each[0] != "none", each[0]))
    return [Planned(load, cell, asked.setup(draft, cell.requests)) for draft, cell, load in order]


def _sized(name: str, setup: Setup, load: int, asked: Asked) -> Cell:
    """The cell of a name, as large as memory lets it be."""
    policy = Policy(name.partition("_")[0])
    cell = Cell(name=name, policy=policy, draft=draft_of(name), requests=load, hot_rows=1)
    return fitted(setup, cell, asked.device_bytes)


class Session:
    """Weights and host pools of all cells, in memory.

    Attributes:
        seconds: that making them took, and the programs of each load.
    """

    def __init__(
        self,
        asked: Asked,
        cells: list[Planned],
        jobs: int,
        rates: Rates,
        tell: Callable[[str, float], None],
    ) -> None:
        """Compile for the first load while weights and pools are made, and tell what is done."""
        self._asked, self._cells, self._jobs, self._tell = asked, cells, jobs, tell
        self.seconds: dict[str, float] = {}
        first = cells[0]
        base = first.setup.config(first.cell)
        with self._compiling(first.load) as programs:
            self._common = Common(patterns(base), asked.context, asked.plan, rates)
            with self._timed("host pools"):
                self._hosts = host_pools(base, self._common.patterns)
            with self._timed("weights"):
                self._weights = first.setup.model.random_weights()
                jax.block_until_ready(self._weights)
            with self._timed("traces"):
                self._chosen = self._traces()
        self._programs = {first.load: programs}
        self._loaded: dict[tuple[str, int], Loaded] = {}

    @contextlib.contextmanager
    def _compiling(self, load: int) -> Generator[dict[Cell, Program], None, None]:
        """The programs of a load; they are there when the body and their compilers are done.

        Of one load at a time: compilers time kernels, which those of another load would disturb.
        """
        made: dict[Cell, Program] = {}
        loads = {each.cell: each.load for each in reversed(self._cells)}  # where it comes first
        unique = {each.cell: each.setup for each in self._cells if loads[each.cell] == load}
        with (
            self._timed(f"programs for {load}"),
            ThreadPoolExecutor(self._jobs) as workers,
            ThreadPoolExecutor(max(1, len(unique))) as pool,
        ):
            compilers = Compilers(workers)
            compiling = {
                cell: pool.submit(compile_step, setup, cell, compilers)
                for cell, setup in unique.items()
            }
            yield made
            made |= {cell: future.result() for cell, future in compiling.items()}

    @contextlib.contextmanager
    def _timed(self, name: str) -> Generator[None, None, None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self._tell(name, self.seconds[name])

    def run(self) -> Iterator[tuple[Planned, dict[str, Any]]]:
        """Every cell and its figures; what is the same cell at two loads runs once."""
        done = dict[Cell, dict[str, Any]]()
        for each in self._cells:
            if each.load not in self._programs:
                with self._compiling(each.load) as programs:
                    pass
                self._programs = {each.load: programs}
            if each.cell not in done:
                done[each.cell] = self._run(each)
            yield each, done[each.cell]

    def _run(self, each: Planned) -> dict[str, Any]:
        key = (each.cell.draft, each.cell.requests)
        if key not in self._loaded:
            self._loaded.clear()  # weights of one draft at a time
            self._loaded[key] = load(
                each.setup, self._weights, self._chosen, self._asked.context, self._asked.survival
            )
        program = self._programs[each.load].pop(each.cell)
        ran = run_cell(self._loaded[key], each.cell, program, self._hosts, self._common)
        self._hosts = ran.hosts
        return ran.figures

    def _traces(self) -> Int[np.ndarray, "traces rows K"]:
        """Traces of all rates, those of one after those of the other."""
        setup, context = self._cells[0].setup, self._asked.context
        rates = sorted(set(setup.model.geometry.rates or (1,)))
        traces, _, k = setup.params.replay.selections.shape
        sizes = {"k": k, "history": context, "rows": self._asked.room + 8}
        return np.concatenate(
            [selections(traces // len(rates), **sizes, rate=rate) for rate in rates]
        )
