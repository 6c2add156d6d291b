"""The drafts over the ring: equal to whole sequences, whatever was accepted on the way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.block import run_blocks
from dhisparse_jax.models.draft.checkpoint import make_draft
from dhisparse_jax.models.draft.drafter import drafter_of
from dhisparse_jax.sampling import Sampler, greedy
from dhisparse_jax.speculation.protocol import Drafter
from dhisparse_jax.speculation.ring import init_ring, visible
from pallas_kernels.common.backends import decisions, targeting
from tests.support.lowering import lowered
from tests.support.small_draft import CONFIGS, draft, random_text, vocabulary

NAMES = ("dflash", "dflash2", "dspark")
LENGTH = 40


@functools.cache
def drafter(name, **changes):
    config, model = draft(name, **changes)
    made, params = drafter_of(model, config, vocabulary(), positions=LENGTH)
    return made, params, model


@functools.cache
def jitted(made):
    return jax.jit(made.commit), jax.jit(made.rows), jax.jit(made.propose)


def rows_after(made, params, state, tokens, length):
    at = jnp.full(len(tokens), length, jnp.int32)
    return jitted(made)[1](params, state, tokens[:, length], at)


def committed(made, params, features, length, *, chunk, state=None):
    """A state with the first `length` features, in chunks of one shape."""
    state = made.init(len(features)) if state is None else state
    ones = jnp.ones(len(features), jnp.int32)
    padded = jnp.pad(features, ((0, 0), (0, chunk), (0, 0)), constant_values=np.nan)
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        part = padded[:, start : start + chunk]
        state = jitted(made)[0](params, state, part, start * ones, count * ones)
    return state


def whole(name, tokens, features, length, **changes):
    made, _, model = drafter(name, **changes)
    anchors = jnp.full((len(tokens), 1), length, jnp.int32)
    return run_blocks(model, made.config, vocabulary(), features, tokens, anchors)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_drafter(name):
    made, params, _ = drafter(name)
    assert isinstance(made, Drafter)
    assert hash(made) == hash(dataclasses.replace(made))
    assert made.window == 6
    assert made.estimates_confidence == (name == "dspark")
    state = made.init(2)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {2}
    got = jitted(made)[2](
        params, state, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), greedy(2)
    )
    assert got.tokens.shape == (2, made.length)
    assert (got.confidence < 1).all() == (name == "dspark")


# Shorter than the window, as long, and more than twice the ring of 10; chunks up to above that.
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "chunk"), [(0, 4), (3, 4), (6, 6), (25, 4), (33, 16)])
def test_the_ring_equals_the_whole_sequence_and_a_full_cache(name, length, chunk):
    made, params, _ = drafter(name)
    tokens, features = random_text(2, LENGTH)
    state = committed(made, params, features, length, chunk=chunk)
    got = rows_after(made, params, state, tokens, length)
    expected = whole(name, tokens, features, length)
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-4)
    config = made.config
    full = init_ring(2, config.num_layers, LENGTH, config.num_kv_heads, config.head_dim, "float32")
    full = committed(made, params, features, length, chunk=chunk, state=full)
    assert state.keys.shape[2] == 6 + config.block_size < full.keys.shape[2]
    got = rows_after(made, params, full, tokens, length)
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-4)


@pytest.mark.parametrize("windows", [(None, None), (None, 5)])
def test_full_attention_gets_a_cache_of_full_length(windows):
    made, params, _ = drafter("dflash", windows=windows)
    assert made.window is None
    assert made.init(1).keys.shape[2] == LENGTH
    tokens, features = random_text(2, LENGTH)
    state = committed(made, params, features, 33, chunk=11)
    got = rows_after(made, params, state, tokens, 33)
    expected = whole("dflash", tokens, features, 33, windows=windows)
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-4)
    with pytest.raises(UserError, match="draft layer 0 attends to the whole history"):
        dataclasses.replace(made, positions=None).init(1)


@pytest.mark.parametrize("name", NAMES)
def test_any_acceptance_leaves_what_a_fresh_start_would(name):
    made, params, _ = drafter(name)
    tokens, features = random_text(3, LENGTH)
    rng = np.random.default_rng(4)
    commit = jitted(made)[0]
    queries = made.length + 1
    state, start = committed(made, params, features, 5, chunk=5), np.full(3, 5)
    seen = set()
    while (start + queries <= LENGTH - 8).any():
        accepted = rng.integers(0, queries, 3)
        accepted[rng.integers(3)] = rng.choice([0, made.length])
        active = start + queries <= LENGTH - 8
        count = np.where(active, accepted + 1, 0)
        seen |= set(accepted[active].tolist())
        at = start[:, None] + np.arange(queries)
        given = np.array(features[np.arange(3)[:, None], np.minimum(at, LENGTH - 1)])
        given[np.arange(queries)[None] >= count[:, None]] = np.nan  # of rejected tokens
        state = commit(params, state, jnp.asarray(given), *map(as_int, (start, count)))
        start = start + count
    assert seen >= {0, made.length}
    np.testing.assert_array_equal(state.next, start)
    for row, length in enumerate(start.tolist()):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        fresh = committed(made, params, features[row : row + 1], length, chunk=9)
        compare_visible(one, fresh)
        got = rows_after(made, params, one, tokens[row : row + 1], length)
        expected = whole(name, tokens[row : row + 1], features[row : row + 1], length)
        np.testing.assert_allclose(got.logits, expected.logits, atol=2e-4)


def as_int(x):
    return jnp.asarray(x, jnp.int32)


def compare_visible(one, other):
    """Both rings hold the same positions in the same slots, with the same keys and values."""
    position, seen = visible(one, one.next[:, None], None)
    np.testing.assert_array_equal(position, visible(other, other.next[:, None], None)[0])
    held = np.asarray(seen[0, 0])
    for name in ("keys", "values"):
        a, b = (np.asarray(getattr(ring, name))[0][:, held] for ring in (one, other))
        np.testing.assert_allclose(a, b, atol=1e-5)


def sampled(requests):
    return Sampler(
        temperature=jnp.full(requests, 0.9, jnp.float32),
        top_k=jnp.zeros(requests, jnp.int32),
        top_p=jnp.ones(requests, jnp.float32),
        key=jax.random.split(jax.random.key(3), requests),
    )


@pytest.mark.parametrize("name", NAMES)
def test_requests_do_not_know_of_each_other(name):
    """A permuted batch gives permuted proposals, and another neighbour changes nothing."""
    made, params, _ = drafter(name)
    propose = jitted(made)[2]
    tokens, features = random_text(3, LENGTH)
    state = committed(made, params, features, 14, chunk=7)
    at = jnp.asarray([14, 14, 14], jnp.int32)
    given = propose(params, state, tokens[:, 14], at, sampled(3))
    order = jnp.asarray([2, 0, 1])
    permuted = jax.tree.map(lambda x: x[order], (state, tokens[:, 14], at, sampled(3)))
    turned = propose(params, *permuted)
    for a, b in zip(jax.tree.leaves(turned), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(a, b[order])
    noise = random_text(3, LENGTH, seed=8)[1]
    other = committed(made, params, noise.at[1].set(features[1]), 14, chunk=7)
    anchors = tokens[:, 14].at[jnp.asarray([0, 2])].set(5)
    alone = propose(params, other, anchors, at.at[0].set(20), sampled(3))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(a[1], b[1])


def test_a_row_forgets_the_request_before():
    made, params, _ = drafter("dflash2")
    tokens, features = random_text(2, LENGTH)
    noise = random_text(2, LENGTH, seed=8)[1]
    state = committed(made, params, noise, 30, chunk=10)
    for row in range(2):
        state = made.reset(state, jnp.int32(row))
    state = committed(made, params, features, 4, chunk=4, state=state)
    got = rows_after(made, params, state, tokens, 4)
    np.testing.assert_allclose(got.logits, whole("dflash2", tokens, features, 4).logits, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_shorter_draft_proposes_the_beginning_of_a_longer_one(name):
    made, params, _ = drafter(name)
    tokens, features = random_text(2, LENGTH)
    state = committed(made, params, features, 12, chunk=12)
    at = jnp.full(2, 12, jnp.int32)
    longer = jitted(made)[2](params, state, tokens[:, 12], at, sampled(2))
    short = dataclasses.replace(made, length=1)
    shorter = short.propose(params, state, tokens[:, 12], at, sampled(2))
    np.testing.assert_array_equal(shorter.tokens, longer.tokens[:, :1])
    np.testing.assert_allclose(shorter.probabilities, longer.probabilities[:, :1], atol=1e-5)


def test_a_block_of_one_kind_is_lowered_for_the_gpu():
    for name in CONFIGS:
        made, params, _ = drafter(name)
        arguments = (params, made.init(2), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
        jax.jit(made.propose).trace(*arguments, greedy(2)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_only_the_kernel_reads_the_ring_on_a_gpu(name):
    config = dataclasses.replace(CONFIGS[name], head_dim=16, windows=(6, 5))
    made, params = drafter_of(make_draft(config, jnp.bfloat16), config, vocabulary())
    state = made.init(2)
    with targeting("gpu"), decisions() as found:
        text = lowered(made.rows, params, state, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
    assert [decision.backend for decision in found] == ["triton"] * config.num_layers
    ring = "x".join(map(str, state.keys.shape)) + "xbf16"
    reading = [line for line in text.splitlines() if ring in line and "func.func" not in line]
    assert len(reading) == config.num_layers + 1  # calls of one function, and the kernel in it
    assert all("call @" in line or "custom_call" in line for line in reading)
