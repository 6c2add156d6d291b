"""Plan: look-up, deduplication and victim choice on calibrated traces."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from bench.plan_steps import PlanSizes, plan_steps, warm_tables
from bench.roofline import Traffic
from bench.traces import trace
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from pallas_kernels.common.backends import Backend
from pallas_kernels.plan import api
from pallas_kernels.plan.types import PlanInput, PlanResult, PlanTables

Operands = list[PlanInput]
"""What every step wants."""

PlanWork = Work[PlanTables, Operands, PlanResult | None]

WORD = 4

DISTINCT_TRACES = 16
"""More requests than this follow traces that others follow too: making a trace takes time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Requests with a full history, each query consecutive to the one before.

    Attributes:
        requests: R.
        queries: T; all are accepted, so that a step's queries are new ones.
        k: K.
        history: positions before the first step.
        budget: slots per request, in units of K.
        calls: steps of a chain.
    """

    requests: int
    queries: int
    k: int = 2048
    history: int = 100_000
    budget: int
    calls: int = 8

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, requests=2, k=64, history=4000, calls=2)

    @property
    def sizes(self) -> PlanSizes:
        """Sizes of the operands."""
        return PlanSizes(
            queries=self.queries,
            budget=self.budget * self.k,
            tail=max(16, 2 * self.queries),
            advance=self.queries,
        )

    @property
    def capacity(self) -> int:
        """Positions of a request after the last step."""
        return self.history + self.calls * self.queries

    def memory(self) -> Memory:
        """See `work.Case`."""
        per_step = 8 * self.requests * self.queries * self.k * WORD
        return Memory(0, 4 * self.requests * self.capacity * WORD + self.calls * per_step)

    def build(self, backend: Backend) -> PlanWork:
        """See `work.Case`."""
        sizes = self.sizes
        drawn = [
            trace(k=self.k, history=self.history, steps=self.calls * self.queries, seed=seed)
            for seed in range(min(self.requests, DISTINCT_TRACES))
        ]
        traces = [drawn[request % len(drawn)] for request in range(self.requests)]
        tables, pages = warm_tables(traces, sizes, self.capacity)
        steps = plan_steps(traces, sizes, pages)
        return Work(
            step=plan_step(bind(api.plan, backend), sizes.page_slots),
            state=tables,
            anew=True,  # a second pass over the same selections would miss little
            operands=[_at(steps, number) for number in range(self.calls)],
            calls=self.calls,
            traffic=Traffic(hbm_bytes=self._bytes()),
            detail={"budget_k": self.budget, "queries": self.queries},
            inspect=partial(_fetched, self.k),
        )

    def _bytes(self) -> float:
        """Selections and tail slots in, locations out, one look-up each; age of every slot."""
        selected = self.requests * self.queries * self.k
        slots = self.requests * self.budget * self.k
        return WORD * (4 * selected + 2 * slots)


def _at(steps: PlanInput, number: int) -> PlanInput:
    return jax.tree.map(lambda leaf: leaf[number], steps)


def plan_step(
    plan: Callable[..., tuple[PlanResult, PlanTables]], page_slots: int
) -> Step[PlanTables, Operands, PlanResult | None]:
    """A step of a chain, which keeps the last result.

    The tables after a step depend on all of it, so no step can be dropped; and within a program
    that uses it a result is no output: handing ten arrays out takes longer than making them.
    """

    def step(
        tables: PlanTables, operands: Operands, call: int
    ) -> tuple[PlanTables, PlanResult | None]:
        result, tables = plan(operands[call], tables, page_slots=page_slots)
        return tables, result if call + 1 == len(operands) else None

    return step


def _fetched(k: int, _: PlanTables, results: list[PlanResult | None]) -> dict[str, float]:
    """Misses and staged records per request in units of K, in the last step of a chain."""
    counts = [result.counts for result in results if result is not None]
    mean = lambda field: float(np.mean([getattr(each, field) for each in counts])) / k
    return {"fetched_k": mean("fetched"), "staged_k": mean("staged")}


CASES: dict[str, Plan] = {
    "16_requests_T1": Plan(requests=16, queries=1, budget=2),
    "16_requests_T8": Plan(requests=16, queries=8, budget=4),
    "16_requests_14_budgets": Plan(requests=16, queries=1, budget=14),
    "5_requests_nearly_all": Plan(requests=5, queries=1, budget=48),
    "128_requests_T1": Plan(requests=128, queries=1, budget=2),
    "128_requests_T8": Plan(requests=128, queries=8, budget=4),
}


def shared(inputs: tuple[PlanInput, PlanTables, int], backend: Backend) -> PlanWork:
    """A benchmark of the inputs of a shared case."""
    (wanted, tables), page_slots = jax.tree.map(jnp.array, inputs[:2]), inputs[2]
    requests, queries, k = wanted.selection.shape
    slots = int((wanted.pages >= 0).sum()) * page_slots
    return Work(
        step=plan_step(bind(api.plan, backend), page_slots),
        state=tables,
        anew=True,
        operands=[wanted],
        calls=1,
        traffic=Traffic(hbm_bytes=WORD * (4 * requests * queries * k + 2 * slots)),
        inspect=partial(_fetched, k),
    )
