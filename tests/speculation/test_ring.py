"""The ring holds what a full cache with a window mask would show, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.speculation.ring import (
    init_ring,
    newest_seen,
    reset_row,
    ring_capacity,
    visible,
    write,
)

LAYERS, HEADS, DIM = 2, 1, 2
WRITE, VISIBLE = jax.jit(write), jax.jit(visible, static_argnums=2)
NEWEST = jax.jit(newest_seen, static_argnums=2)


def rows(positions, layer_sign=1):
    """A key for every position, another one in every layer: [layers, n, heads, dim]."""
    base = np.asarray(positions, np.float32)[None, :, None, None]
    layer = np.arange(LAYERS, dtype=np.float32)[:, None, None, None] * 1000
    return np.broadcast_to(layer_sign * (base + layer), (LAYERS, len(positions), HEADS, DIM))


class FullCache:
    """The oracle: every committed position of one request, for ever."""

    def __init__(self):
        self.keys = {}

    def append(self, start, count):
        for position in range(start, start + count):
            self.keys[position] = rows([position])[:, 0]

    def window(self, query, width):
        return {p: k for p, k in self.keys.items() if width is None or query - p < width}


class Pair:
    """A ring of some requests beside full caches; rows beyond the count are poison."""

    def __init__(self, requests, capacity):
        self.ring = init_ring(requests, LAYERS, capacity, HEADS, DIM, jnp.float32)
        self.full = [FullCache() for _ in range(requests)]

    def commit(self, width, counts):
        start = np.asarray(self.ring.next)
        keys = np.full((len(counts), LAYERS, width, HEADS, DIM), np.nan, np.float32)
        for row, count in enumerate(counts):
            keys[row, :, :count] = rows(range(start[row], start[row] + count))
            self.full[row].append(int(start[row]), count)
        self.ring = WRITE(self.ring, keys, -keys, start, np.asarray(counts, np.int32))

    def check(self, block, window):
        """Every query of a block sees the positions and the numbers that the oracle shows it."""
        at = np.asarray(self.ring.next)[:, None] + np.arange(block, dtype=np.int32)
        positions, seen = jax.device_get(VISIBLE(self.ring, jnp.asarray(at), window))
        keys, values = np.asarray(self.ring.keys), np.asarray(self.ring.values)
        newest = np.asarray(NEWEST(self.ring, jnp.asarray(at), window))[..., None]
        assert newest.max() <= keys.shape[2]
        age = np.asarray(self.ring.next)[:, None] - 1 - positions
        np.testing.assert_array_equal(seen, (positions >= 0)[:, None] & (age[:, None] < newest))
        np.testing.assert_array_equal(newest[..., 0], seen.sum(axis=2))
        for row, full in enumerate(self.full):
            for query in range(block):
                slots = np.nonzero(seen[row, query])[0]
                expected = full.window(int(at[row, query]), window)
                assert sorted(positions[row, slots].tolist()) == sorted(expected)
                for slot in slots:
                    np.testing.assert_array_equal(
                        keys[row, :, slot], expected[int(positions[row, slot])]
                    )
                np.testing.assert_array_equal(keys[row][:, slots], -values[row][:, slots])


@pytest.mark.parametrize(("window", "block"), [(8, 3), (5, 4)])
@pytest.mark.parametrize("extra", [-1, None], ids=["smallest", "window_and_block"])
def test_ring_equals_full_cache_after_random_acceptance(window, block, extra):
    capacity = ring_capacity([window] * LAYERS, block) if extra is None else window + extra
    pair, rng = Pair(4, capacity), np.random.default_rng(window)
    pair.check(block, window)
    for step in range(60):
        counts = rng.integers(0, block + 1, 4)
        counts[0], counts[1] = (0, block) if step % 3 else (block, 0)
        pair.commit(block, counts.tolist())
        pair.check(block, window)
    assert (np.asarray(pair.ring.next) > 2 * capacity).all()


@pytest.mark.parametrize("prompt", [0, 1, 7, 8, 11, 12, 25, 40])
def test_prompt_of_any_length_in_one_chunk(prompt):
    """Shorter than, equal to, and far beyond window 8 and ring 11; the chunk is longer than it."""
    pair = Pair(2, ring_capacity([8], 3))
    pair.commit(40, [prompt, 40 - prompt])
    pair.check(3, 8)
    pair.commit(3, [3, 1])
    pair.check(3, 8)


def test_prompt_in_chunks_longer_than_the_ring():
    pair = Pair(1, ring_capacity([4], 2))
    for count in (16, 16, 5):
        pair.commit(16, [count])
        pair.check(2, 4)


def test_full_length_cache_sees_everything():
    pair = Pair(2, ring_capacity([8, None], 3, positions=32))
    for counts in ([20, 3], [2, 3], [0, 1], [3, 3]):
        pair.commit(20, counts)
        pair.check(3, None)
        pair.check(3, 8)


def test_reset_forgets_one_request():
    pair = Pair(2, 6)
    pair.commit(4, [4, 3])
    pair.ring = reset_row(pair.ring, jnp.int32(0))
    pair.full[0] = FullCache()
    pair.check(2, 4)
    pair.commit(4, [2, 1])
    pair.check(2, 4)


def test_window_that_is_too_wide_for_the_ring_is_seen_by_this_test():
    """The comparison can fail: slots of overwritten positions are missing from a small ring."""
    pair = Pair(1, 4)
    pair.commit(12, [12])
    with pytest.raises(AssertionError):
        pair.check(3, 8)


def test_capacity_of_a_ring():
    assert ring_capacity([8, 4], 3) == 11
    assert ring_capacity([2048], 8, positions=512) == 512
    assert ring_capacity([8, None], 3, positions=100) == 100
    with pytest.raises(UserError, match="draft layer 1 attends to the whole history"):
        ring_capacity([8, None], 3)
