"""A hierarchy without a model and without records: what a policy fetches for given selections.

The admission, the plan, the retiring, the adaptation and the page code are those of the library, on
a state whose records and index keys are zero words wide. What is simulated is thus exact, and costs
no more than the bookkeeping. Selections come from calibrated traces (`bench.traces`) or from
recorded ones; requests join and leave between steps and may share a trace.

To be fast on a CPU, where the reference plan looks at every entry of every page list, the rows and
the columns that are empty are left out of the plan's operands. That changes no result.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bench.traces import Trace, verify_queries
from dhisparse_jax.config import Geometry, HierarchyConfig, RowFormat
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.adapt import adapt
from dhisparse_jax.hierarchy.commit import commit
from dhisparse_jax.hierarchy.plan import finish_plan, plan_input, plan_tables
from dhisparse_jax.hierarchy.state import FILL, HierarchyState, abstract
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.plan.api import plan as plan_op
from pallas_kernels.plan.types import PlanCounts, PlanResult

MOST_STEPS = 10
"""Steps per call: page lists grow meanwhile, and room for that is planned in vain."""


def geometry(top_k: int, pools: int = 1) -> Geometry:
    """Of a model with nothing but selections."""
    return Geometry(
        row=RowFormat(width=1, value_width=1, dtype="float32"),
        layers_per_pool=(1,) * pools,
        top_k=top_k,
        index_width=1,
        index_dtype="float32",
        scale=1.0,
    )


class Script(NamedTuple):
    """What requests select: `windows[t, n]` are the selections of step n of trace t.

    Attributes:
        windows: int32 selected positions.
        history: positions before the first step, the same for every trace.
        advance: tokens that a step accepts.
    """

    windows: Int[np.ndarray, "traces n T K"]
    history: int
    advance: int = 1


def script(traces: Sequence[Trace], queries: int = 1, advance: int = 1) -> Script:
    """Traces as a script, with the positions named in the order of their last selection.

    An admission keeps the newest positions, so that way it starts in steady state.
    """
    history = len(traces[0].stack)
    windows = []
    for sample in traces:
        name = np.empty(history + len(sample.selection), np.int32)
        name[sample.stack] = np.arange(history, dtype=np.int32)[::-1]
        name[history:] = np.arange(history, len(name))
        windows.append(verify_queries(name[sample.selection], queries, advance))
    return Script(np.stack(windows), history, advance)


@pytree
class Cast:
    """Who is in which row.

    Attributes:
        trace: which trace each row follows in each pool.
        age: steps that its request has made.
    """

    trace: Int[Array, "pools R"]
    age: Int[Array, " R"]


class StepRecord(NamedTuple):
    """What a step did, per request row and summed over the pools unless said otherwise.

    Attributes:
        active: rows with a request.
        selected: records selected.
        fetched: records fetched.
        held: pages held in the step, per pool.
        moved: pages that came to a new holder after it, of any pool and row.
        taken: pages taken from a holder.
    """

    active: Bool[Array, " R"]
    selected: Int[Array, " R"]
    fetched: Int[Array, " R"]
    held: Int[Array, "pools R"]
    moved: Int[Array, ""]
    taken: Int[Array, ""]


class Simulator:
    """Requests over a fixed number of rows; `join`, `leave`, `run`."""

    def __init__(self, cfg: HierarchyConfig, play: Script) -> None:
        self.cfg, self._play = cfg, play
        self._windows = jnp.asarray(play.windows)
        self.state = _empty(cfg)
        rows = (cfg.pools, cfg.requests)
        self._cast = Cast(trace=jnp.zeros(rows, jnp.int32), age=jnp.zeros(rows[1], jnp.int32))
        self._join = jax.jit(partial(_join, cfg), donate_argnums=(0, 1))
        self._leave = jax.jit(lambda state, row: requests.leave(state, cfg, row), donate_argnums=0)
        self._steps = jax.jit(
            partial(_steps, cfg, play.advance), static_argnums=(3, 4, 5), donate_argnums=(0, 1)
        )

    @property
    def active(self) -> Bool[np.ndarray, " R"]:
        """Rows with a request."""
        return np.asarray(self.state.active)

    @property
    def budget(self) -> Int[np.ndarray, "pools R"]:
        """Pages held."""
        return np.asarray(self.state.budget)

    def join(self, trace: Sequence[int] | int) -> int:
        """A request that follows a trace, or one per pool, takes the lowest free row."""
        row = int(np.flatnonzero(~self.active)[0])
        follows = jnp.broadcast_to(jnp.asarray(trace, jnp.int32), (self.cfg.pools,))
        length = jnp.int32(self._play.history)
        self.state, self._cast = self._join(self.state, self._cast, jnp.int32(row), length, follows)
        return row

    def leave(self, row: int) -> None:
        """The request in `row` is done."""
        self.state = self._leave(self.state, jnp.int32(row))

    def run(self, steps: int) -> StepRecord:
        """So many steps; every leaf gets a first axis of steps."""
        parts = []
        while steps:
            count = min(steps, MOST_STEPS)
            rows = int(np.flatnonzero(self.active).max(initial=0)) + 1
            pages = self.budget.max() + count * self.cfg.moves_per_step
            size = lambda need, most: min(1 << int(need - 1).bit_length(), most)
            self.state, self._cast, record = self._steps(
                self.state,
                self._cast,
                self._windows,
                count,
                size(rows, self.cfg.requests),
                size(pages, self.cfg.max_pages),
            )
            parts.append(jax.device_get(record))
            steps -= count
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _empty(cfg: HierarchyConfig) -> HierarchyState:
    """An empty hierarchy whose records and index keys have no words."""

    def allocate(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name = path[-1].name
        shape = (*leaf.shape[:-1], 0) if name in ("host", "slots", "index_keys") else leaf.shape
        return jnp.full(shape, FILL.get(name, 0), leaf.dtype)

    return jax.tree_util.tree_map_with_path(allocate, abstract(cfg))


def _join(
    cfg: HierarchyConfig,
    state: HierarchyState,
    cast: Cast,
    row: Int[Array, ""],
    length: Int[Array, ""],
    trace: Int[Array, " pools"],
) -> tuple[HierarchyState, Cast]:
    state = requests.join(state, cfg, row, length)
    nothing = jnp.zeros((cfg.capacity, 0), jnp.int32)
    for pool in range(cfg.pools):
        state = requests.admit_prompt(state, cfg, pool, row, nothing, nothing.astype(jnp.float32))
    return state, Cast(trace=cast.trace.at[:, row].set(trace), age=cast.age.at[row].set(0))


def _steps(
    cfg: HierarchyConfig,
    advance: int,
    state: HierarchyState,
    cast: Cast,
    windows: Int[Array, "traces n T K"],
    steps: int,
    rows: int,
    columns: int,
) -> tuple[HierarchyState, Cast, StepRecord]:
    """`steps` decode steps; no row from `rows` on is active, no list has more than `columns`."""

    def step(
        carry: tuple[HierarchyState, Cast], _: None
    ) -> tuple[tuple[HierarchyState, Cast], StepRecord]:
        state, cast = carry
        held, active = state.budget, state.active
        for pool in range(cfg.pools):
            selection = windows[cast.trace[pool], cast.age]
            selection = jnp.where(active[:, None, None], selection, NO_SLOT)
            state = _plan(state, cfg, pool, selection, rows, columns)
        counts = state.counts
        state = adapt(commit(state, jnp.full_like(state.length, advance)), cfg)
        change = state.budget - held
        record = StepRecord(
            active=active,
            selected=counts.selected.sum(axis=0),
            fetched=counts.fetched.sum(axis=0),
            held=held,
            moved=jnp.maximum(change, 0).sum(),
            taken=jnp.maximum(-change, 0).sum(),
        )
        return (state, dataclasses.replace(cast, age=cast.age + 1)), record

    (state, cast), record = jax.lax.scan(step, (state, cast), None, length=steps)
    return state, cast, record


def _plan(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    selection: Int[Array, "R T K"],
    rows: int,
    columns: int,
) -> HierarchyState:
    """`hierarchy.plan` of the first rows, with the first columns of their page lists."""
    wanted, tables = plan_input(state, cfg, pool, selection), plan_tables(state, cfg, pool)
    tail = wanted.tail._replace(start=wanted.tail.start[:rows], first=wanted.tail.first[:rows])
    wanted = wanted._replace(
        selection=selection[:rows],
        tail=tail,
        retiring=wanted.retiring[:rows],
        staging=wanted.staging[:rows],
        pages=wanted.pages[:rows, :columns],
    )
    few = tables._replace(slot_of=tables.slot_of[:rows])
    result, after = plan_op(wanted, few, page_slots=cfg.page_slots)
    after = after._replace(slot_of=tables.slot_of.at[:rows].set(after.slot_of))
    result = PlanResult(
        *(_rows(leaf, cfg.requests, NO_SLOT) for leaf in result[:-1]),
        counts=PlanCounts(*(_rows(leaf, cfg.requests, 0) for leaf in result.counts)),
    )
    return finish_plan(state, cfg, pool, result, after)


def _rows(leaf: Int[Array, "n ..."], rows: int, fill: int) -> Int[Array, "R ..."]:
    """`leaf` with more rows, filled with `fill`."""
    more = [(0, rows - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, more, constant_values=fill)
