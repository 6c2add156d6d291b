"""Index scores in float64 NumPy, and how near to them an implementation has to be."""

import numpy as np

from pallas_kernels.index_scores.types import ScaledKeys


def expected(inputs):
    """Scores in float64, one position at a time."""
    queries, keys = inputs.queries.astype(np.float64), inputs.keys
    if isinstance(keys, ScaledKeys):
        keys = keys.numbers.astype(np.float64) * keys.scales.astype(np.float64)[..., None]
    keys = keys.astype(np.float64)
    scores = np.full((*inputs.visible.shape, keys.shape[1]), -np.inf)
    for request, query in np.ndindex(*inputs.visible.shape):
        for position in range(min(inputs.visible[request, query], keys.shape[1])):
            relevance = np.maximum(queries[request, query] @ keys[request, position], 0.0)
            scores[request, query, position] = inputs.weights[request, query] @ relevance
    return scores


def assert_close(inputs, scores):
    """Float32 arithmetic on the exact operands; -inf exactly where nothing is visible."""
    scores, wanted = np.asarray(scores), expected(inputs)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(wanted))
    seen = ~np.isneginf(wanted)
    np.testing.assert_allclose(scores[seen], wanted[seen], rtol=1e-5, atol=1e-4)
