"""Operands of the plan operation, step by step, for requests that follow calibrated traces.

The tables start as they are in steady state: every request's slots hold what it selected last. The
tail, the retiring positions and the staging slots are those of `dhisparse_jax.hierarchy` with one
pool and the policy `fixed`.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bench.traces import Trace, verify_queries
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.plan.types import PlanInput, PlanTables, Tail


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """Sizes of the plans of one pool.

    Attributes:
        queries: T.
        budget: hot slots of each request.
        page_slots: slots per page; divides the budget.
        tail: length of the tail rings, at least 2 T.
        advance: tokens accepted per step.
    """

    queries: int = 1
    budget: int
    page_slots: int = 16
    tail: int = 16
    advance: int = 1


def warm_tables(
    traces: Sequence[Trace], sizes: PlanSizes, capacity: int
) -> tuple[PlanTables, Int[Array, "R Pmax"]]:
    """The tables before the first step (number 1), and the page lists.

    Every request has `budget` slots in random pages, which hold the top of its stack. As in a
    hierarchy the lists have room for the whole history: NO_SLOT after the pages that are held.
    """
    rng = np.random.default_rng(0)
    requests, held = len(traces), sizes.budget // sizes.page_slots
    pages = np.full((requests, -(-capacity // sizes.page_slots)), NO_SLOT, np.int32)
    pages[:, :held] = rng.permutation(requests * held).reshape(requests, held)
    slot_of = np.full((requests, capacity), NO_SLOT, np.int32)
    position = np.empty(requests * sizes.budget, np.int32)
    mark = np.empty(requests * sizes.budget, np.int32)
    for request, sample in enumerate(traces):
        owned = pages[request, :held, None] * sizes.page_slots + np.arange(sizes.page_slots)
        slots = rng.permutation(owned.reshape(-1))
        slot_of[request, sample.stack[: sizes.budget]] = slots
        position[slots] = sample.stack[: sizes.budget]
        mark[slots] = -(np.arange(sizes.budget) // sample.selection.shape[1])
    tables = PlanTables(*(jnp.asarray(table) for table in (slot_of, position, mark)))
    return tables, jnp.asarray(pages)


def plan_steps(traces: Sequence[Trace], sizes: PlanSizes, pages: Int[Array, "R Pmax"]) -> PlanInput:
    """What every step wants: the leaves of `PlanInput` with the steps as a leading axis."""
    windows = [verify_queries(sample.selection, sizes.queries, sizes.advance) for sample in traces]
    selection = np.stack(windows, axis=1)
    steps, requests, queries, k = selection.shape
    length = len(traces[0].stack) + sizes.advance * np.arange(steps)
    oldest = length + queries - sizes.tail  # the first position that the tail holds
    rings = requests * sizes.budget + sizes.tail * np.arange(requests)
    staging = max(0, queries * k - sizes.budget)
    first = requests * (sizes.budget + sizes.tail)
    staged = first + np.arange(requests * staging).reshape(requests, staging)
    retiring = oldest[:, None] + np.arange(queries)
    every = lambda array, *shape: jnp.broadcast_to(jnp.asarray(array, jnp.int32), (steps, *shape))
    return PlanInput(
        selection=jnp.asarray(selection),
        tail=Tail(
            start=every(oldest[:, None], requests),
            first=every(rings, requests),
            length=every(sizes.tail),
        ),
        retiring=every(retiring[:, None], requests, queries),
        staging=every(staged, *staged.shape),
        pages=every(pages, *pages.shape),
        step=1 + jnp.arange(steps, dtype=jnp.int32),
    )
