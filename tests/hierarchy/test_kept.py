"""What layers keep beside records, against plain lists of everything that was accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry, Kept, RowFormat
from dhisparse_jax.hierarchy import init, requests
from dhisparse_jax.hierarchy.kept import admit_kept, attend_kept, keep, kept_rows

CAPACITY, SPAN, RATE, WIDTH = 40, 6, 4, 3
RING = Kept(width=WIDTH, dtype="float32", span=SPAN)
ALL = Kept(width=WIDTH, dtype="float32", rate=RATE)
ROW = RowFormat(width=WIDTH, value_width=WIDTH, dtype="float32")
GEOMETRY = Geometry(
    row=ROW,
    layers_per_pool=(1,),
    top_k=2,
    index_width=2,
    index_dtype="float32",
    scale=0.5,
    rates=(RATE,),
    kept=((RING, ALL),),
)


def config(queries):
    return HierarchyConfig(
        geometry=GEOMETRY,
        policy=Policy.FIXED,
        requests=2,
        capacity=CAPACITY,
        queries=queries,
        hot_rows=2,
        tail=2 * queries,
    )


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_a_ring_has_the_newest_accepted_rows_whatever_was_rejected(queries):
    rng = np.random.default_rng(queries)
    write = jax.jit(lambda leaf, *new: keep(leaf, RING, *new))
    read = jax.jit(lambda leaf, index: kept_rows(leaf, RING, index))
    leaf = jnp.full((2, RING.rows(CAPACITY, queries), WIDTH), jnp.nan)
    accepted = [[], []]
    for _ in range(60):
        length = np.array([len(rows) for rows in accepted], np.int32)
        position = length[:, None] + np.arange(queries, dtype=np.int32)
        fresh = rng.normal(size=(2, queries, WIDTH)).astype(np.float32)
        writes = rng.random(2) < 0.8
        leaf = write(leaf, position, fresh, writes)
        window = position[..., None] - np.arange(SPAN, dtype=np.int32)
        found = read(leaf, window)
        for row in np.flatnonzero(writes):
            history = np.array([*accepted[row], *fresh[row]])
            there = window[row] >= 0
            assert np.array_equal(found[row][there], history[window[row][there]])
            kept = len(accepted[row]) + rng.integers(0, queries + 1)
            accepted[row] = history[:kept].tolist()
    assert min(map(len, accepted)) > 2 * SPAN


def test_rows_of_all_stop_at_the_capacity():
    leaf = jnp.zeros((2, ALL.rows(CAPACITY, 1), WIDTH))
    assert leaf.shape[1] == CAPACITY // RATE
    number = jnp.asarray([[8, 9, 10], [0, -1, 3]], jnp.int32)
    rows = jnp.ones((2, 3, WIDTH))
    leaf = keep(leaf, ALL, number, rows, jnp.ones(2, bool))
    assert np.argwhere(np.asarray(leaf).all(axis=2)).tolist() == [[0, 8], [0, 9], [1, 0], [1, 3]]


@pytest.mark.parametrize("length", [1, 5, 17, 39])
def test_a_prompt_brings_what_the_next_query_reads(length):
    """From the larger ring of prefill, with rows of padding behind the prompt."""
    cfg, chunk, row = config(3), 8, jnp.int32(1)
    rng = np.random.default_rng(length)
    whole = rng.normal(size=(48, WIDTH)).astype(np.float32)
    entries = rng.normal(size=(CAPACITY // RATE, WIDTH)).astype(np.float32)
    ring = jnp.zeros((1, RING.rows(CAPACITY, chunk), WIDTH))
    for start in range(0, length, chunk):
        position = np.arange(start, start + chunk, dtype=np.int32)[None]
        new = (jnp.asarray(position), jnp.asarray(whole[position]), jnp.ones(1, bool))
        ring = keep(ring, RING, *new)
    state = requests.join(init(cfg), cfg, row, jnp.int32(length))
    state = admit_kept(state, cfg, 0, row, (ring, jnp.asarray(entries)[None]))
    near, far = state.pools[0].kept
    seen = np.arange(max(0, length - SPAN + 1), length)
    index = jnp.asarray(np.broadcast_to(seen, (2, len(seen))), jnp.int32)
    assert np.array_equal(kept_rows(near, RING, index)[1], whole[seen])
    assert np.array_equal(far[1], entries)
    assert not np.asarray(far[0]).any()


def test_attention_over_kept_rows_with_a_sink():
    rng = np.random.default_rng(0)
    rows, query = rng.normal(size=(2, 8, WIDTH)), rng.normal(size=(2, 1, 2, WIDTH))
    sinks = np.array([0.3, -1.0])
    leaf = jax.lax.bitcast_convert_type(jnp.asarray(rows, jnp.float32), jnp.int32)
    kept = Kept(width=WIDTH, dtype="int32", span=8)
    index = np.array([[[9, 8, -1]], [[3, -1, -1]]])
    values, lse = attend_kept(
        leaf,
        kept,
        GEOMETRY,
        jnp.asarray(index, jnp.int32),
        jnp.asarray(query, jnp.float32),
        jnp.asarray(sinks, jnp.float32),
    )
    for request in range(2):
        chosen = rows[request][[p % 8 for p in index[request, 0] if p >= 0]]
        logits = 0.5 * query[request, 0] @ chosen.T
        weights = np.exp(logits)
        total = weights.sum(axis=1) + np.exp(sinks)
        assert np.allclose(values[request, 0], weights @ chosen / total[:, None], atol=1e-6)
        assert np.allclose(lse[request, 0], np.log(total), atol=1e-6)


def test_the_history_of_such_a_model_is_not_moved():
    with pytest.raises(UserError, match="a session is not possible with this model") as raised:
        GEOMETRY.check_movable("a session")
    assert "\n" not in str(raised.value)
