"""`top_k` against a plain sort of (score, position) pairs."""

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.top_k.api import top_k
from pallas_kernels.top_k.cases import CASES


def best(scores, k):
    """Positions of one query: by descending score, then ascending position; -1 fills up."""
    selectable = [position for position, score in enumerate(scores) if score > -np.inf]
    # -0.0 == 0.0 in Python too, so the two zeros tie here.
    selectable.sort(key=lambda position: (-scores[position], position))
    return (selectable + [-1] * k)[:k]


@pytest.mark.parametrize("name", CASES)
def test_equals_sorted_pairs(name):
    scores, k = CASES[name]()
    selection = np.asarray(jax.jit(partial(top_k, k=k))(scores))
    wanted = [[best(query.tolist(), k) for query in request] for request in scores]
    assert selection.dtype == np.int32
    np.testing.assert_array_equal(selection, wanted)
