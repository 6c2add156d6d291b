"""`sparse_attention` against float64 NumPy."""

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.cases import CASES

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def attended(inputs):
    query, rows = inputs.query.astype(np.float64), inputs.rows.astype(np.float64)
    values = np.zeros((*query.shape[:3], inputs.value_width))
    for request, t, head in np.ndindex(*query.shape[:3]):
        location = inputs.location[request, t]
        selected = rows[location[location >= 0]]
        if len(selected):
            logits = inputs.scale * selected @ query[request, t, head]
            weights = np.exp(logits - logits.max())
            values[request, t, head] = weights / weights.sum() @ selected[:, : inputs.value_width]
    return values


def run(inputs):
    options = {name: getattr(inputs, name) for name in inputs._fields[3:7]}
    return jax.jit(partial(sparse_attention, **options))(*inputs[:3])


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    inputs = CASES[name]()
    values = np.asarray(run(inputs))
    assert values.dtype == inputs.query.dtype
    tolerance = TOLERANCE[inputs.row_dtype]
    np.testing.assert_allclose(
        values.astype(np.float64), attended(inputs), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", ["all_masked", "one_masked_request"])
def test_nothing_selected_gives_exact_zeros(name):
    inputs = CASES[name]()
    empty = (inputs.location < 0).all(axis=-1)
    assert empty.any()
    assert (np.asarray(run(inputs))[empty] == 0.0).all()


def test_order_of_the_selection_hardly_matters():
    inputs = CASES["float32"]()
    reversed_ = inputs._replace(location=inputs.location[..., ::-1].copy())
    np.testing.assert_allclose(run(inputs), run(reversed_), rtol=1e-6, atol=1e-6)
