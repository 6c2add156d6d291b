"""What the library assumes about host operands on a GPU. Each failure says what changed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.request import Request
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.backup.api import backup
from pallas_kernels.retrieve.api import retrieve
from tests.support.toy_model import toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]

WORDS = [96, 164, 288, 672]


def _case(words, records=5000, slots=700, entries=301, seed=0):
    rng = np.random.default_rng(seed)
    pool = rng.integers(-(2**31), 2**31, (records, words), dtype=np.int32)
    hot = rng.integers(-(2**31), 2**31, (slots, words), dtype=np.int32)
    rows = rng.permutation(records)[:entries].astype(np.int32)
    places = rng.permutation(slots)[:entries].astype(np.int32)
    rows[rng.random(entries) < 0.1] = -1
    places[rng.random(entries) < 0.1] = -1
    return pool, hot, rows, places


@pytest.mark.parametrize("words", WORDS)
def test_retrieve_reads_pinned_memory_in_place(words):
    pool, hot, rows, places = _case(words)
    host = jax.device_put(pool, host_sharding())
    run = jax.jit(retrieve, donate_argnums=1)
    args = (host, jnp.asarray(hot), jnp.asarray(rows), jnp.asarray(places))
    memory = run.lower(*args).compile().memory_analysis()
    assert memory.host_temp_size_in_bytes == 0, "retrieve now copies the host pool on the host"
    assert memory.temp_size_in_bytes < pool.nbytes // 8, (
        "retrieve now copies the pool to the device"
    )
    live = (rows >= 0) & (places >= 0)
    hot[places[live]] = pool[rows[live]]
    np.testing.assert_array_equal(np.asarray(run(*args)), hot)


@pytest.mark.parametrize("words", WORDS)
def test_backup_writes_pinned_memory_in_place(words):
    hot, pool, sources, rows = _case(words, records=700, slots=5000)
    host = jax.device_put(pool, host_sharding())
    pointer = host.unsafe_buffer_pointer()
    run = jax.jit(backup, donate_argnums=0)
    written = run(host, jnp.asarray(hot), jnp.asarray(rows), jnp.asarray(sources))
    assert written.unsafe_buffer_pointer() == pointer, "backup no longer writes in place"
    assert written.sharding.memory_kind == "pinned_host", "backup's result lost its memory kind"
    live = (rows >= 0) & (sources >= 0)
    pool[rows[live]] = hot[sources[live]]
    np.testing.assert_array_equal(np.asarray(written), pool)


def _run(policy, hot_rows, requests):
    model, params = toy()
    cfg = HierarchyConfig(
        geometry=model.geometry,
        policy=policy,
        requests=2,
        capacity=96,
        hot_rows=hot_rows,
        tail=6,
    )
    engine = Engine(model, params, cfg, chunk=16)
    pointers = [pool.host.unsafe_buffer_pointer() for pool in engine.state.pools]
    tokens, total = {}, StepMetrics()
    for event in engine.run(requests):
        if isinstance(event, NewTokens):
            tokens.setdefault(event.request, []).extend(event.tokens)
        if isinstance(event, StepDone):
            total += event.metrics
    assert all(check_invariants(engine.state, cfg).values())
    assert [pool.host.unsafe_buffer_pointer() for pool in engine.state.pools] == pointers
    return tokens, total


@functools.cache
def _requests():
    rng = np.random.default_rng(1)
    sizes = [(5, 30), (40, 20), (90, 30), (1, 50), (33, 7)]
    return [
        Request(name=str(n), prompt=tuple(int(t) for t in rng.integers(0, 61, n)), max_new_tokens=m)
        for n, m in sizes
    ]


def test_policies_agree_on_the_gpu():
    resident, metrics = _run(Policy.RESIDENT, 1, _requests())
    assert metrics.fetched_rows == 0
    for policy, rows in [(Policy.FIXED, 16), (Policy.FIXED, 3), (Policy.ADAPTIVE, 24)]:
        tokens, metrics = _run(policy, rows, _requests())
        assert metrics.fetched_rows > 0
        assert tokens == resident
