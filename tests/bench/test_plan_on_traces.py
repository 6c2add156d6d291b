"""The library's plan on calibrated traces: its misses are those of an exact LRU cache."""

from functools import partial

import jax
import numpy as np
import pytest

from bench.caches import lru, simulate
from bench.plan_steps import PlanSizes, plan_steps, warm_tables
from bench.traces import trace, unions, verify_queries
from pallas_kernels.plan.api import plan

K, HISTORY, STEPS, REQUESTS = 64, 6000, 240, 3


def _traces():
    return [trace(k=K, history=HISTORY, steps=STEPS, seed=seed) for seed in range(REQUESTS)]


def _fetched(traces, sizes):
    """Records that the plan fetches per step and request."""
    tables, pages = warm_tables(traces, sizes, HISTORY + STEPS)
    op = partial(plan, page_slots=sizes.page_slots)

    @jax.jit
    def run(tables, steps):
        def body(tables, wanted):
            result, tables = op(wanted, tables)
            return tables, result.counts

        return jax.lax.scan(body, tables, steps)[1]

    counts = run(tables, plan_steps(traces, sizes, pages))
    assert not np.any(counts.staged)
    return np.asarray(counts.fetched)


def _lru(traces, sizes):
    """Records that an exact LRU cache with as many slots fetches per step and request."""
    fetched = []
    for sample in traces:
        steps = unions(verify_queries(sample.selection, sizes.queries, sizes.advance))
        missed = simulate(steps, lru, sample.stack[: sizes.budget], HISTORY)
        fetched.append([len(each) for each in missed])
    return np.array(fetched).T


@pytest.mark.parametrize(
    ("queries", "advance", "budget"), [(1, 1, 2 * K), (1, 1, 4 * K), (8, 4, 8 * K), (2, 1, 3 * K)]
)
def test_plan_misses_as_exact_lru(queries, advance, budget):
    traces = _traces()
    sizes = PlanSizes(queries=queries, budget=budget, tail=2 * queries, advance=advance)
    planned, exact = _fetched(traces, sizes), _lru(traces, sizes)
    assert planned.shape == exact.shape
    assert planned.mean() / K > 0.01
    assert planned.mean() == pytest.approx(exact.mean(), rel=0.05)
