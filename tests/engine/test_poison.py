"""What must not be read is poisoned after every step, and the tokens stay the same."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.hierarchy import layout
from dhisparse_jax.speculation.ring import visible
from tests.support.host import host_rows
from tests.support.serving import CONTEXT, POLICIES, drafted, engine, request, run
from tests.support.toy_draft import toy_draft, with_errs

NAN_WORD = np.int32(-1)  # a NaN in float32
REQUESTS = [request(n, 14, seed=n) for n in (5, 40, CONTEXT - 20, 1, 33)]


def put(values, like):
    """`values` where `like` is."""
    return jax.device_put(jnp.asarray(values), like.sharding)


def poison_hosts(served):
    """All host records, committed or not."""
    pools = [
        dataclasses.replace(pool, host=put(np.full(pool.host.shape, NAN_WORD), pool.host))
        for pool in served.state.pools
    ]
    served.state = dataclasses.replace(served.state, pools=tuple(pools))


def poison_unused(served):
    """Empty hot slots, staging, tail places about to be written; everything past the lengths."""
    state, cfg = jax.device_get(served.state), served.cfg
    beyond = np.arange(cfg.capacity) >= state.length[:, None]
    unused = np.ones(len(state.pools[0].host), bool)
    unused[host_rows(cfg, state)[~beyond]] = False
    pools = []
    for old, pool in zip(served.state.pools, state.pools, strict=True):
        host, keys = pool.host.copy(), pool.index_keys.copy()
        host[unused] = NAN_WORD
        keys[beyond] = 1e30
        new = {"host": put(host, old.host), "index_keys": put(keys, old.index_keys)}
        pools.append(dataclasses.replace(old, **new))
    slots = state.hot[0].slots.copy()
    slots[np.flatnonzero(state.hot[0].position < 0)] = NAN_WORD
    slots[np.asarray(layout.staging_slots(cfg, 0)).reshape(-1)] = NAN_WORD
    rows = jnp.arange(cfg.requests, dtype=jnp.int32)
    for pool, query in np.ndindex(cfg.pools, cfg.queries):
        slots[np.asarray(layout.tail_slot(cfg, pool, rows, jnp.asarray(state.length + query)))] = (
            NAN_WORD
        )
    hot = served.state.hot[0]
    hot = dataclasses.replace(hot, slots=put(slots, hot.slots))
    served.state = dataclasses.replace(served.state, pools=tuple(pools), hot=(hot,))


@pytest.fixture(scope="module")
def tokens():
    return run(engine("resident", 1), REQUESTS).tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_unused_memory_is_never_read(tokens, policy):
    served = engine(*POLICIES[policy])
    assert run(served, REQUESTS, after_step=lambda: poison_unused(served)).tokens == tokens


def poison_ring(served):
    """Slots of the draft ring that no query of the next block may see."""
    ring = jax.device_get(served.draft_state)
    ahead = ring.next[:, None] + np.arange(served.cfg.queries, dtype=np.int32)
    _, seen = visible(served.draft_state, jnp.asarray(ahead), served.drafter.window)
    hidden = ~np.asarray(seen).any(axis=1)[:, None, :, None, None]
    spoilt = lambda part, like: put(np.where(hidden, np.float32(np.nan), part), like)
    old = served.draft_state
    served.draft_state = dataclasses.replace(
        old, keys=spoilt(ring.keys, old.keys), values=spoilt(ring.values, old.values)
    )


@pytest.mark.parametrize("errs", [0, 5, 16])
def test_rejected_rows_are_never_read(tokens, errs):
    """Of the target's memory and of the draft's: the same tokens, and the same acceptance."""
    served = with_errs(speculating(tokens), errs)
    clean = run(served, REQUESTS)

    def poison():
        poison_unused(served)
        poison_ring(served)

    poisoned = run(served, REQUESTS, after_step=poison)
    assert clean.tokens == poisoned.tokens == tokens
    assert clean.acceptance == poisoned.acceptance
    kept = np.asarray(served.draft_state.keys)
    assert np.isnan(kept).any()  # there was something to poison


@cache
def speculating_texts(texts):
    draft = toy_draft([list(text) for text in texts], length=3)
    return drafted(*POLICIES["fixed"], draft)


def speculating(tokens):
    texts = [(*asked.prompt, *tokens[number]) for number, asked in enumerate(REQUESTS)]
    return speculating_texts(tuple(texts))


def test_resident_never_reads_the_host(tokens):
    served = engine(*POLICIES["resident"])
    assert run(served, REQUESTS, after_step=lambda: poison_hosts(served)).tokens == tokens


def test_poison_is_noticed(tokens):
    """The comparison can fail: a small budget does read the host."""
    served = engine(*POLICIES["fixed"])
    assert run(served, REQUESTS, after_step=lambda: poison_hosts(served)).tokens != tokens
