"""`top_k` and `plan` as they run on a GPU, against the exact references."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.plan_steps import PlanSizes, plan_steps, warm_tables
from bench.traces import trace
from pallas_kernels.plan import cases as plan_cases
from pallas_kernels.plan import reference as plan_reference
from pallas_kernels.plan import triton as plan_triton
from pallas_kernels.plan.api import plan
from pallas_kernels.top_k import cases as top_k_cases
from pallas_kernels.top_k import reference as top_k_reference
from pallas_kernels.top_k.api import top_k

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("name", top_k_cases.CASES)
def test_top_k(name):
    scores, k = top_k_cases.CASES[name]()
    found = jax.jit(partial(top_k, k=k, backend="triton"))(jnp.asarray(scores))
    np.testing.assert_array_equal(found, top_k_reference.top_k(jnp.asarray(scores), k))


@pytest.mark.parametrize("distinct", [100_000, 40, 1])
def test_top_k_of_a_long_history(distinct):
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.integers(0, distinct, (8, 2, 100_000)), jnp.float32)
    found = jax.jit(partial(top_k, k=2048, backend="triton"))(scores)
    np.testing.assert_array_equal(found, top_k_reference.top_k(scores, 2048))


@pytest.mark.parametrize("name", plan_cases.CASES)
def test_plan(name):
    inputs = plan_cases.CASES[name]()
    small = plan_triton.Tuning(
        look_block=64,
        look_unroll=2,
        look_warps=2,
        look_programs=6,
        block=8,
        slots=16,
        moves=4,
        warps=4,
    )
    wanted = plan_reference.plan(inputs.wanted, inputs.tables, page_slots=inputs.page_slots)
    for run in (
        partial(plan, backend="triton"),
        *([] if name.startswith("glm") else [partial(plan_triton.plan, tuning=small)]),
    ):
        run = jax.jit(partial(run, page_slots=inputs.page_slots))
        jax.tree.map(np.testing.assert_array_equal, run(inputs.wanted, inputs.tables), wanted)


def test_plan_over_many_steps_is_exact_and_in_place():
    k, history, steps, queries = 512, 30_000, 40, 4
    traces = [trace(k=k, history=history, steps=steps, seed=seed) for seed in range(6)]
    sizes = PlanSizes(queries=queries, budget=4 * k, advance=2)
    tables, pages = warm_tables(traces, sizes, history + steps)
    wanted = plan_steps(traces, sizes, pages)
    run = partial(plan, page_slots=sizes.page_slots)
    kernels = jax.jit(partial(run, backend="triton"), donate_argnums=1)
    exact = jax.jit(partial(run, backend="reference"))
    first = jax.tree.map(lambda leaf: leaf[0], wanted)
    temporary = kernels.lower(first, tables).compile().memory_analysis().temp_size_in_bytes
    block = plan_triton.Tuning().slots
    ages = 4 * len(traces) * -(-pages.shape[1] * sizes.page_slots // block) * block
    assert temporary < ages + tables.slot_of.nbytes, "the plan now copies the tables"
    planned, expected = jax.tree.map(jnp.copy, tables), tables
    for step in range(wanted.step.shape[0]):
        now = jax.tree.map(lambda leaf, step=step: leaf[step], wanted)
        (result, planned), (other, expected) = kernels(now, planned), exact(now, expected)
        jax.tree.map(np.testing.assert_array_equal, (result, planned), (other, expected))
