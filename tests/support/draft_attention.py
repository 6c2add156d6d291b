"""Attention of a block over its ring in NumPy float64, row by row, and what may differ from it."""

import jax
import numpy as np


def exact(inputs):
    """From the definition, position by position; and the root of the sum of squared summands."""
    inputs = jax.tree.map(np.asarray, inputs)
    found, size = np.zeros((2, *inputs.queries.shape))
    for request, token, head in np.ndindex(found.shape[:3]):
        keys, values = _attended(inputs, request, token, head)
        logits = keys @ _wide(inputs.queries[request, token, head]) * keys.shape[1] ** -0.5
        weights = np.exp(logits - logits.max())
        summands = weights[:, None] * values / weights.sum()
        found[request, token, head] = summands.sum(axis=0)
        size[request, token, head] = np.sqrt((summands**2).sum(axis=0))
    return found, size


def _attended(inputs, request, token, head):
    """Keys and values that a row sees."""
    _, _, capacity, kv, _ = inputs.ring.keys.shape
    end, count = int(inputs.seen.next[request]), int(inputs.seen.counts[request, token])
    slots = [position % capacity for position in range(end - count, end)]
    rows = np.nonzero(inputs.seen.block[token])[0]
    key_head = head // (inputs.queries.shape[2] // kv)
    for ring, own in zip(inputs.ring, inputs.own, strict=True):
        held = ring[request, inputs.layer, slots, key_head]
        yield _wide(np.concatenate((held, own[request, rows, key_head])))


def _wide(x):
    return np.asarray(x, np.float64)


def assert_close(inputs, found):
    """Float32 to 1e-5; bfloat16 to two roundings of the summands and of the sum."""
    wanted, size = exact(inputs)
    assert found.shape == inputs.queries.shape
    assert found.dtype == inputs.queries.dtype
    near = 1e-5 if found.dtype == np.float32 else 2.0**-7
    error = np.abs(_wide(found) - wanted)
    assert (error <= near * (np.abs(wanted) + size)).all(), error.max()
