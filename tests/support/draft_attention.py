"""Attention of a block over its ring in NumPy float64, row by row, and what may differ from it."""

import numpy as np


def exact(inputs):
    """From the definition, position by position."""
    wide = lambda x: np.asarray(x, np.float64)
    found = np.zeros(inputs.queries.shape)
    _, _, capacity, kv, dim = inputs.ring.keys.shape
    for request, token, head in np.ndindex(found.shape[:3]):
        end, count = int(inputs.seen.next[request]), int(inputs.seen.counts[request, token])
        slots = [position % capacity for position in range(end - count, end)]
        rows = np.nonzero(inputs.seen.block[token])[0]
        key_head = head // (found.shape[2] // kv)
        keys, values = (
            np.concatenate(
                (
                    wide(ring[request, inputs.layer, slots, key_head]),
                    wide(own[request, rows, key_head]),
                )
            )
            for ring, own in zip(inputs.ring, inputs.own, strict=True)
        )
        logits = keys @ wide(inputs.queries[request, token, head]) * dim**-0.5
        weights = np.exp(logits - logits.max())
        found[request, token, head] = weights @ values / weights.sum()
    return found


def assert_close(inputs, found):
    """Float32 to 1e-5; bfloat16 to the rounding of its weights and of the result."""
    wanted = exact(inputs)
    assert found.shape == inputs.queries.shape
    assert found.dtype == inputs.queries.dtype
    near = 1e-5 if found.dtype == np.float32 else 2.0**-7
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=near, atol=near * np.abs(wanted).std()
    )
