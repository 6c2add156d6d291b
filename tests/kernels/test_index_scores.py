"""`index_scores` against float64 NumPy."""

import jax
import numpy as np
import pytest

from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.cases import CASES


def expected(inputs):
    """Scores in float64, one position at a time."""
    queries, keys = inputs.queries.astype(np.float64), inputs.keys.astype(np.float64)
    scores = np.full((*inputs.visible.shape, keys.shape[1]), -np.inf)
    for request, query in np.ndindex(*inputs.visible.shape):
        for position in range(min(inputs.visible[request, query], keys.shape[1])):
            relevance = np.maximum(queries[request, query] @ keys[request, position], 0.0)
            scores[request, query, position] = inputs.weights[request, query] @ relevance
    return scores


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    inputs = CASES[name]()
    scores = np.asarray(jax.jit(index_scores)(*inputs))
    wanted = expected(inputs)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(wanted))
    seen = ~np.isneginf(wanted)
    np.testing.assert_allclose(scores[seen], wanted[seen], rtol=1e-5, atol=1e-4)


def test_hidden_keys_do_not_matter():
    inputs = CASES["poisoned_future"]()
    clean = inputs.keys.copy()
    clean[0, 40:], clean[1] = 0.0, 0.0
    run = jax.jit(index_scores)
    np.testing.assert_array_equal(run(*inputs), run(*inputs._replace(keys=clean)))
