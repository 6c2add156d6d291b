"""Rejected rows leave no trace: the visible state is that of never having proposed them.

Visible are committed host records, committed index keys, and the slots in which the tables say that
a record is. The tables may differ: rejected queries select too, so other records may be resident.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.invariants import check_invariants
from tests.support.host import host_rows
from tests.support.serving import engine, prompt

QUERIES = 4
PROMPTS = [prompt(11, seed=1), prompt(40, seed=2), prompt(3, seed=3)]
TOKENS = np.array([prompt(8, seed=seed) for seed in (4, 5, 6)], np.int32)


@pytest.fixture(params=["fixed", "resident"])
def served(request):
    served = engine(request.param, {"fixed": 4, "resident": 1}[request.param], queries=QUERIES)
    for row, tokens in enumerate(PROMPTS):
        list(served.prefill(row, row, tokens))
    yield served
    for row in range(len(PROMPTS)):
        served.leave(row)


def step(served, block, accepted):
    logits, _, state = served.compiled.forward(served.params, served.state, jnp.asarray(block))
    served.state = served.compiled.finish(state, jnp.asarray(accepted, jnp.int32))
    return np.asarray(logits)


def with_junk(tokens, accepted, seed):
    """The accepted tokens of every row, then random ones."""
    block = np.random.default_rng(seed).integers(0, 61, tokens.shape, np.int32)
    kept = np.arange(tokens.shape[1]) < np.array(accepted)[:, None]
    return np.where(kept, tokens, block)


def visible(served):
    """All that a later step may read, by name; slots that hold nothing valid are left out."""
    state, cfg = jax.device_get(served.state), served.cfg
    parts = {"length": state.length, "active": state.active}
    for pool, row in np.ndindex(cfg.pools, cfg.requests):
        length, mine = state.length[row], state.pools[pool]
        parts[f"host {pool} {row}"] = mine.host[host_rows(cfg, state)[row, :length]]
        parts[f"keys {pool} {row}"] = mine.index_keys[row, :length]
        held = np.arange(max(0, length + cfg.queries - cfg.tail), length, dtype=np.int32)
        slot = layout.tail_slot(cfg, pool, jnp.full_like(held, row), jnp.asarray(held))
        parts[f"tail {pool} {row}"] = state.hot[0].slots[np.asarray(slot)]
    return parts


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, part in first.items():
        np.testing.assert_array_equal(part, second[name], err_msg=name)


def copied(state):
    """A copy that donation does not touch; the host pools stay host pools."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf.copy(), leaf.sharding), state)


@pytest.mark.parametrize("accepted", [(2, 2, 2), (1, 3, 4), (4, 1, 2)])
def test_what_was_rejected_does_not_matter(served, accepted):
    start = copied(served.state)
    seen, after = [], []
    for seed in (0, 1):
        served.state = copied(start)
        step(served, with_junk(TOKENS[:, :QUERIES], accepted, seed), accepted)
        assert all(check_invariants(served.state, served.cfg).values())
        seen.append(visible(served))
        after.append(step(served, TOKENS[:, QUERIES:], (4, 4, 4)))
    assert_same(*seen)
    np.testing.assert_array_equal(*after)


def test_same_as_one_token_at_a_time(served):
    """Two accepted of four, against two steps of one accepted token each: the same bytes."""
    start = copied(served.state)
    step(served, with_junk(TOKENS[:, :QUERIES], (2, 2, 2), seed=0), (2, 2, 2))
    together = visible(served)
    served.state = copied(start)
    for number in range(2):
        block = np.roll(TOKENS, -number, axis=1)[:, :QUERIES]
        step(served, with_junk(block, (1, 1, 1), seed=number), (1, 1, 1))
    assert_same(together, visible(served))


def test_nothing_is_committed_before_the_end_of_a_step(served):
    before = visible(served)
    _, _, state = served.compiled.forward(
        served.params, served.state, jnp.asarray(TOKENS[:, :QUERIES])
    )
    served.state = state
    after = visible(served)
    assert_same(before, after)


def test_comparison_sees_accepted_tokens(served):
    """The comparison itself can fail."""
    start = copied(served.state)
    step(served, TOKENS[:, :QUERIES], (2, 2, 2))
    one = visible(served)
    served.state = copied(start)
    step(served, with_junk(TOKENS[:, :QUERIES], (1, 2, 2), seed=0), (2, 2, 2))
    other = visible(served)
    differing = {name for name in one if not np.array_equal(one[name], other[name])}
    assert differing == {f"{part} {pool} 0" for part in ("host", "keys", "tail") for pool in (0, 1)}


def test_a_full_request_stays_full_and_harms_nobody(served):
    """Accepting past the capacity must not reach the host rows of the next request."""
    capacity = served.cfg.capacity
    served.leave(0)
    list(served.prefill(0, 0, prompt(capacity - 2, seed=7)))
    others = host_rows(served.cfg, jax.device_get(served.state))[1:].reshape(-1)
    before = [np.asarray(pool.host)[others] for pool in served.state.pools]
    step(served, TOKENS[:, :QUERIES], (4, 0, 0))
    assert np.asarray(served.state.length)[0] == capacity
    for records, pool in zip(before, served.state.pools, strict=True):
        np.testing.assert_array_equal(records, np.asarray(pool.host)[others])
    assert all(check_invariants(served.state, served.cfg).values())
