"""One program per function for every load, and no copy of the state from step to step."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine import compiled
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.state import HOST_KIND, abstract
from dhisparse_jax.sampling import Sampling
from tests.support.lowering import lowered_kernels
from tests.support.serving import CONTEXT, POLICIES, engine, prompt, request, run

COMPILED = []


def _listen(name, seconds, **_):
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture(params=POLICIES)
def served(request):
    return engine(*POLICIES[request.param])


def test_the_listener_listens():
    before = len(COMPILED)
    jax.jit(lambda x: x * 3 + 1)(jnp.zeros(3))
    assert len(COMPILED) > before


def test_no_compilation_after_warm_up(served):
    """Other lengths, other loads, other sampling, other budgets: the same programs."""
    warm = [request(5, 4), request(20, 3, seed=1, sampling=Sampling(temperature=1.0))]
    run(served, warm)
    traces, compiled = served.compiled.traces(), len(COMPILED)
    loads = set()
    many = [request(1, 60), request(CONTEXT - 2, 5, seed=2), request(30, 12, seed=3)]
    many += [
        request(n, n % 7 + 1, seed=n, sampling=Sampling(temperature=0.7, top_k=n, seed=n))
        for n in (2, 16, 17, 70)
    ]
    run(served, many, after_step=lambda: loads.add(str(served.state.budget)))
    run(served, many[:1])
    assert served.compiled.traces() == traces
    assert len(COMPILED) == compiled
    assert len(loads) >= 3


def test_one_program_per_function(served):
    """Per pool where the pool is static; also for the first and the second call."""
    run(served, [request(n, 3, seed=n) for n in (5, 20, 40, 60)])
    list(forced_logits(served, prompt(40), 30))
    count = lambda name: getattr(served.compiled, name)._cache_size()
    once = (
        "step",
        "join",
        "leave",
        "embed",
        "first_token",
        "set_text",
        "draft_prompt",
        "draft_reset",
    )
    for name in (*once, "forward", "finish", "logits"):
        assert (name, count(name)) == (name, 1)
    for name in ("prefill", "admit", "begin_prompt"):
        assert (name, count(name)) == (name, served.cfg.pools)


in_place = pytest.mark.xfail(
    jax.default_backend() == "cpu" and jax.__version_info__ >= (0, 11),
    reason="a CPU copies donated host pools on jax 0.11.2, and donated arrays that were read",
    strict=True,
)


def pointers(state):
    """Where the large arrays are: host pools, hot slots, index keys."""
    arrays = [array for pool in state.pools for array in (pool.host, pool.host_keys)]
    arrays += [hot.slots for hot in state.hot]
    arrays += [pool.index_keys for pool in state.pools]
    return [array.unsafe_buffer_pointer() for array in arrays]


@in_place
def test_state_stays_in_place(served):
    """Host pools and hot slots are updated where they are, by every call of the engine."""
    run(served, [request(5, 2)])
    before = pointers(served.state)
    seen = []
    requests = [request(40, 30), request(9, 20, seed=1), request(50, 9, seed=2), request(3, 9)]
    run(served, requests, after_step=lambda: seen.append(pointers(served.state)))
    assert len(seen) > 20
    assert all(now == before for now in seen)
    assert pointers(served.state) == before


@in_place
def test_outputs_are_in_two_places(served):
    """What a graph of kernels writes has one of two addresses."""
    seen = []
    place = lambda: served._places[-1].numbers.unsafe_buffer_pointer()
    run(served, [request(40, 30), request(9, 20)], after_step=lambda: seen.append(place()))
    assert len(seen) > 20
    assert len(set(seen)) == 2


@in_place
def test_old_states_are_donated(served):
    old = served.state
    list(served.prefill(0, 0, prompt(5)))
    served.leave(0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.pools) + jax.tree.leaves(old.hot))


def test_host_pools_stay_in_host_memory(served):
    kinds = lambda: {pool.host.sharding.memory_kind for pool in served.state.pools}
    seen = [kinds()]
    run(served, [request(40, 9), request(9, 5)], after_step=lambda: seen.append(kinds()))
    assert seen == [{HOST_KIND}] * len(seen)
    device = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(served.state.hot)}
    assert HOST_KIND not in device


def test_a_session_is_read_by_the_retrieval_kernel(monkeypatch):
    """At GLM-5.3's sizes; XLA would copy the whole host pool."""
    triton = partial(requests.retrieve_op, backend="triton")
    monkeypatch.setattr(requests, "retrieve_op", triton)
    geometry = Geometry(
        row=RowFormat(576, 512, "bfloat16"),
        layers_per_pool=(1, 4),
        top_k=2048,
        index_width=128,
        index_dtype="bfloat16",
        scale=1.0,
    )
    cfg = HierarchyConfig(
        geometry=geometry, policy=Policy.ADAPTIVE, requests=16, capacity=100_000, hot_rows=28_000
    )
    number = jax.ShapeDtypeStruct((), jnp.int32)
    pages = jax.ShapeDtypeStruct((cfg.row_pages,), jnp.int32)
    for pool in range(cfg.pools):
        capture = lambda state, pages, length, pool=pool: compiled._capture(
            cfg, state, pool, pages, length
        )
        assert lowered_kernels(capture, abstract(cfg), pages, number) == 2
