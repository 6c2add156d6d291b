"""What the library assumes about host operands on a GPU. Each failure says what changed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.memory import pinned_bytes
from dhisparse_jax.engine.request import Request
from dhisparse_jax.hierarchy.invariants import check_invariants
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.backup import launch
from pallas_kernels.backup.api import backup
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches, Moves
from tests.support.toy_model import toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]

WORDS = [96, 164, 288, 672]
RNG = np.random.default_rng(0)
POOLS_AT_ONCE = [True] if launch.SEVERAL_RESULTS else []
"""Whether one kernel writes all pools. Where it can, the other form must work too."""


def _words(*shape):
    return RNG.integers(-(2**31), 2**31, shape, dtype=np.int32)


def _ids(size, count, skipped=0.1):
    ids = RNG.permutation(size)[:count].astype(np.int32)
    ids[RNG.random(count) < skipped] = -1
    return ids


def _copy(target, to, source, from_):
    live = (to >= 0) & (from_ >= 0)
    target[to[live]] = source[from_[live]]


def _compiled(function, donate, *arguments):
    """The compiled function, after a look at what it allocates beside its operands."""
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.host_temp_size_in_bytes == 0, "XLA now copies host pools on the host"
    assert memory.temp_size_in_bytes < 100_000, "XLA now copies host pools to the device"
    return compiled, memory


def _pointers(hosts):
    return [host.unsafe_buffer_pointer() for host in hosts]


def _check_hosts(hosts, pointers, wanted):
    assert _pointers(hosts) == pointers, "XLA no longer updates a donated host pool in place"
    kinds = {host.sharding.memory_kind for host in hosts}
    assert kinds == {"pinned_host"}, "a kernel's result in host memory lost its memory kind"
    for host, words in zip(hosts, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(host), words)


@pytest.mark.parametrize("words", WORDS)
def test_retrieve_reads_pinned_memory_in_place(words):
    pool, hot = _words(4500, words), _words(900, words)
    rows = np.stack([_ids(4500, 200) for _ in range(3)])
    targets, counts = _ids(600, 600).reshape(3, 200), np.array([200, 0, 77], np.int32)
    sources, moved = _ids(200, 50) + 700, _ids(90, 50)
    sources[sources < 700] = -1
    moved[moved >= 0] += 600
    operands = (
        jax.device_put(pool, host_sharding()),
        jnp.asarray(hot),
        Fetches(*map(jnp.asarray, (rows, targets, counts))),
        Moves(jnp.asarray(sources), jnp.asarray(moved)),
    )
    run, _ = _compiled(retrieve, 1, *operands)
    result, before = hot.copy(), hot
    _copy(result, moved, before, sources)
    for request, count in enumerate(counts):
        _copy(result, targets[request, :count], pool, rows[request, :count])
    np.testing.assert_array_equal(np.asarray(run(*operands)), result)
    np.testing.assert_array_equal(np.asarray(operands[0]), pool)


@pytest.mark.parametrize("at_once", [*POOLS_AT_ONCE, False])
def test_backup_writes_every_pool_in_place(at_once, monkeypatch):
    monkeypatch.setattr(launch, "SEVERAL_RESULTS", at_once)
    slots = [_words(700, words) for words in WORDS]
    slots_of = [0, 1, 2, 3, 3, 1, 3]
    pools = [_words(2000, WORDS[array]) for array in slots_of]
    rows, sources = _ids(2000, 301), np.stack([_ids(700, 301) for _ in pools])
    hosts = [jax.device_put(pool, host_sharding()) for pool in pools]
    pointers = _pointers(hosts)

    def back_up(hosts, slots, rows, sources):
        return backup(hosts, [slots[array] for array in slots_of], rows, sources)

    operands = hosts, *jax.tree.map(jnp.asarray, (slots, rows, sources))
    run, memory = _compiled(back_up, 0, *operands)
    assert memory.host_alias_size_in_bytes == sum(pool.nbytes for pool in pools), (
        "XLA no longer lets every donated host pool be its result"
    )
    kernels = run.as_text().count('custom_call_target="__gpu$xla.gpu.triton"')
    assert kernels == (1 if at_once else len(pools)), "a backup is not one kernel any more"
    for pool, array, from_ in zip(pools, slots_of, sources, strict=True):
        _copy(pool, rows, slots[array], from_)
    _check_hosts(run(*operands), pointers, pools)


LOOPS = {
    "scan": lambda body, carry: jax.lax.scan(lambda c, _: (body(c), None), carry, length=4)[0],
    "while": lambda body, carry: jax.lax.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, body(c[1])), (jnp.int32(0), carry)
    )[1],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_host_pools_are_the_carry_of_a_loop(loop):
    """Each turn reads from a pool what the last one wrote there, so the order must hold."""
    pools, hot = [_words(500, 96) for _ in range(3)], _words(300, 96)
    rows, sources = (
        _ids(500, 40, 0),
        np.stack([_ids(100, 40, 0) + 200 * turn for turn in (0, 1, 0)]),
    )
    targets = _ids(200, 40, 0)
    hosts = [jax.device_put(pool, host_sharding()) for pool in pools]
    pointers = _pointers(hosts)

    def turn(carry):
        hosts, slots, rows, sources, targets = carry
        hosts = backup(hosts, [slots] * 3, rows, sources)
        fetches = Fetches(rows[None], targets[None], jnp.full(1, 40, jnp.int32))
        return tuple(hosts), retrieve(hosts[1], slots, fetches), rows, sources, targets

    run = lambda *carry: LOOPS[loop](turn, carry)[:2]
    operands = tuple(hosts), *map(jnp.asarray, (hot, rows, sources, targets))
    run, _ = _compiled(run, (0, 1), *operands)
    for _ in range(4):
        for pool, from_ in zip(pools, sources, strict=True):
            _copy(pool, rows, hot, from_)
        _copy(hot, targets, pools[1], rows)
    hosts, slots = run(*operands)
    _check_hosts(hosts, pointers, pools)
    np.testing.assert_array_equal(np.asarray(slots), hot)


def test_a_loop_may_close_over_a_host_pool():
    pool, hot = _words(2000, 96), _words(300, 96)
    rows, targets = _ids(2000, 40, 0), _ids(300, 40, 0)

    def run(host, slots, rows, targets):
        def turn(slots, step):
            fetches = Fetches((rows + step)[None] % 2000, targets[None], jnp.full(1, 40, jnp.int32))
            return retrieve(host, slots, fetches), None

        return jax.lax.scan(turn, slots, jnp.arange(3, dtype=jnp.int32))[0]

    host = jax.device_put(pool, host_sharding())
    operands = host, *map(jnp.asarray, (hot, rows, targets))
    compiled, _ = _compiled(run, 1, *operands)
    _copy(hot, targets, pool, (rows + 2) % 2000)
    np.testing.assert_array_equal(np.asarray(compiled(*operands)), hot)


def test_a_pool_of_more_words_than_32_bits_count():
    words, records = 672, 2**31 // 672 + 40
    host = jax.device_put(np.zeros((records, words), np.int32), host_sharding())
    last = records - 1
    rows = np.array(
        [0, 1, 2**30 // words, last // 2, last - 39, last, records, 2**31 - 1], np.int32
    )
    slots = _words(8, words)
    every = jnp.arange(8, dtype=jnp.int32)
    write = jax.jit(backup, donate_argnums=0)
    (written,) = write([host], [jnp.asarray(slots)], jnp.asarray(rows), every[None])
    fetches = Fetches(jnp.asarray(rows)[None], every[None], jnp.full(1, 8, jnp.int32))
    read = jax.jit(retrieve)(written, jnp.zeros((8, words), jnp.int32), fetches)
    slots[6:] = -1  # no such records
    np.testing.assert_array_equal(np.asarray(read), slots)
    # What a 32-bit offset would hit instead of the last record.
    wrapped = (last * words - 2**31) // words + np.arange(2, dtype=np.int32)
    fetches = Fetches(
        jnp.asarray(wrapped, jnp.int32)[None], every[None, :2], jnp.full(1, 2, jnp.int32)
    )
    read = jax.jit(retrieve)(written, jnp.ones((2, words), jnp.int32), fetches)
    assert not np.asarray(read).any(), "a record was written 2**31 words below its place"


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
    before = pinned_bytes()
    engine = Engine(model, params, cfg, chunk=16)
    assert pinned_bytes() - before == engine.sizes.host_bytes
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


def test_shared_prefixes_on_the_gpu():
    """The second and third request begin as the first: 40 and 37 positions, 2 whole pages."""
    (first, *_) = (request for request in _requests() if len(request.prompt) == 90)
    prompts = (first.prompt[:48], (*first.prompt[:40], 3, 1), first.prompt[:38])
    requests = [
        Request(name=str(n), prompt=prompt, max_new_tokens=20) for n, prompt in enumerate(prompts)
    ]
    for policy, rows in [(Policy.RESIDENT, 1), (Policy.FIXED, 3), (Policy.ADAPTIVE, 24)]:
        tokens, _ = _run(policy, rows, requests)
        alone = [_run(policy, rows, [request])[0][0] for request in requests]
        assert [tokens[number] for number in range(3)] == alone
