"""A hierarchy without a model and without records: what a policy fetches for given selections.

The admission, the plan, the retiring, the adaptation and the page code are those of the library, on
a state whose records and index keys are zero words wide. What is simulated is thus exact, and costs
no more than the bookkeeping. Selections come from calibrated traces (`bench.traces`) or from
recorded ones; requests join and leave between steps and may share a trace.

To be fast on a CPU, where the reference plan looks at every entry of every page list, the rows and
the columns that are empty are left out of the plan's operands. That changes no result.
"""

import dataclasses
import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bench.script import Script
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.adapt import adapt
from dhisparse_jax.hierarchy.admit import admit_prompt
from dhisparse_jax.hierarchy.commit import commit
from dhisparse_jax.hierarchy.plan import finish_plan, plan_input, plan_tables
from dhisparse_jax.hierarchy.state import FILL, HOST_LEAVES, HierarchyState, abstract
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.plan.api import plan as plan_op
from pallas_kernels.plan.types import PlanCounts, PlanResult

MOST_STEPS = 10
"""Steps per call, or else 1: page lists grow meanwhile, and room for that is planned in vain."""


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


@pytree
class Cast:
    """Who is in which row.

    Attributes:
        trace: which trace each row follows in each pool; they are of one history and advance alike.
        age: steps that its request has made.
    """

    trace: Int[Array, "pools R"]
    age: Int[Array, " R"]


class StepRecord(NamedTuple):
    """What a step did.

    Attributes:
        active: rows with a request.
        emitted: tokens.
        selected: records selected.
        fetched: records fetched.
        held: pages held in the step.
        moved: pages that came to a new holder after it, of any pool and row.
        taken: pages taken from a holder.
    """

    active: Bool[Array, " R"]
    emitted: Int[Array, " R"]
    selected: Int[Array, "pools R"]
    fetched: Int[Array, "pools R"]
    held: Int[Array, "pools R"]
    moved: Int[Array, ""]
    taken: Int[Array, ""]


class Programs(NamedTuple):
    """The jitted functions of a configuration."""

    enter: Any
    admit: Any
    leave: Any
    steps: Any

    def traces(self) -> int:
        """How many programs they hold."""
        return sum(program._cache_size() for program in self)


@functools.cache
def programs(cfg: HierarchyConfig) -> Programs:
    """Shared by all simulators of a configuration: compiling takes longer than most runs."""
    return Programs(
        enter=jax.jit(partial(_enter, cfg), donate_argnums=(0, 1)),
        admit=jax.jit(partial(_admit, cfg), static_argnums=1, donate_argnums=0),
        leave=jax.jit(lambda state, row: requests.leave(state, cfg, row), donate_argnums=0),
        steps=jax.jit(partial(_steps, cfg), static_argnums=(3, 4, 5), donate_argnums=(0, 1)),
    )


class Simulator:
    """Requests over a fixed number of rows; `join`, `leave`, `run`."""

    def __init__(self, cfg: HierarchyConfig, play: Script) -> None:
        # Index keys have no words here, so they need no scales.
        geometry = dataclasses.replace(cfg.geometry, index_dtype="float32")
        cfg = dataclasses.replace(cfg, geometry=geometry)
        self.cfg, self._play = cfg, jax.tree.map(jnp.asarray, play)
        self.state = _empty(cfg)
        rows = (cfg.pools, cfg.requests)
        self._cast = Cast(trace=jnp.zeros(rows, jnp.int32), age=jnp.zeros(rows[1], jnp.int32))
        self._programs = programs(cfg)

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
        self.enter(row, trace)
        for pool in range(self.cfg.pools):
            self.admit(row, pool)
        return row

    def enter(self, row: int, trace: Sequence[int] | int) -> None:
        """A request takes a free row; `admit` must follow for every pool, before it selects."""
        follows = jnp.broadcast_to(jnp.asarray(trace, jnp.int32), (self.cfg.pools,))
        length = self._play.history[follows[0]]
        self.state, self._cast = self._programs.enter(
            self.state, self._cast, jnp.int32(row), length, follows
        )

    def admit(self, row: int, pool: int) -> None:
        """The prompt of a row's request fills its pages of one pool."""
        self.state = self._programs.admit(self.state, pool, jnp.int32(row))

    def leave(self, row: int) -> None:
        """The request in `row` is done."""
        self.state = self._programs.leave(self.state, jnp.int32(row))

    def run(self, steps: int) -> StepRecord:
        """So many steps; every leaf gets a first axis of steps."""
        parts = []
        while steps:
            count = MOST_STEPS if steps >= MOST_STEPS else 1
            rows = int(np.flatnonzero(self.active).max(initial=0)) + 1
            pages = self.budget.max() + count * self.cfg.moves_per_step
            self.state, self._cast, record = self._programs.steps(
                self.state,
                self._cast,
                self._play,
                count,
                _room(rows, 2, self.cfg.requests),
                _room(int(pages), 4, self.cfg.max_pages(0)),
            )
            parts.append(jax.device_get(record))
            steps -= count
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _room(need: int, factor: int, most: int) -> int:
    """The least power of `factor` that is not below `need`: few sizes, so few programs."""
    room = 1
    while room < need:
        room *= factor
    return min(room, most)


def _empty(cfg: HierarchyConfig) -> HierarchyState:
    """An empty hierarchy whose records and index keys have no words."""

    def allocate(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name = path[-1].name
        words = name in (*HOST_LEAVES, "slots", "index_keys")
        shape = (*leaf.shape[:-1], 0) if words else leaf.shape
        return jnp.full(shape, FILL.get(name, 0), leaf.dtype)

    return jax.tree_util.tree_map_with_path(allocate, abstract(cfg))


def _enter(
    cfg: HierarchyConfig,
    state: HierarchyState,
    cast: Cast,
    row: Int[Array, ""],
    length: Int[Array, ""],
    trace: Int[Array, " pools"],
) -> tuple[HierarchyState, Cast]:
    state = requests.join(state, cfg, row, length)
    return state, Cast(trace=cast.trace.at[:, row].set(trace), age=cast.age.at[row].set(0))


def _admit(
    cfg: HierarchyConfig, state: HierarchyState, pool: int, row: Int[Array, ""]
) -> HierarchyState:
    nothing = jnp.zeros((cfg.capacity, 0), jnp.int32)
    keys = jax.tree.map(lambda every: every[0], state.pools[pool].index_keys)
    return admit_prompt(state, cfg, pool, row, nothing, keys)


def _steps(
    cfg: HierarchyConfig,
    state: HierarchyState,
    cast: Cast,
    play: Script,
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
            selection = play.windows[cast.trace[pool], cast.age]
            selection = jnp.where(active[:, None, None], selection, NO_SLOT)
            state = _plan(state, cfg, pool, selection, rows, columns)
        counts = state.counts
        emitted = jnp.where(active, play.advance[cast.trace[0], cast.age], 0)
        state = adapt(commit(state, cfg, emitted), cfg)
        change = state.budget - held
        record = StepRecord(
            active=active,
            emitted=emitted,
            selected=counts.selected,
            fetched=counts.fetched,
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
        *(_rows(leaf, cfg.requests, NO_SLOT) for leaf in result[:-2]),
        held=_rows(result.held, cfg.requests, 0),
        counts=PlanCounts(*(_rows(leaf, cfg.requests, 0) for leaf in result.counts)),
    )
    return finish_plan(state, cfg, pool, result, after)


def _rows(leaf: Int[Array, "n ..."], rows: int, fill: int) -> Int[Array, "R ..."]:
    """`leaf` with more rows, filled with `fill`."""
    more = [(0, rows - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, more, constant_values=fill)
