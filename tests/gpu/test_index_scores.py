"""The kernels of index scores as they run on a GPU, against float64 NumPy and the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import mosaic, reference
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.cases import CASES, fp8, glm
from tests.support.scores import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("name", CASES)
def test_shared_cases(name):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(index_scores)(*inputs))


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 17])
@pytest.mark.parametrize("make", [glm, fp8])
def test_default_tunings(make, queries):
    inputs = make(requests=3, queries=queries, positions=2000, visible=(1983, 640, 0))
    assert_close(inputs, jax.jit(partial(index_scores, backend="mosaic"))(*inputs))


@pytest.mark.parametrize(
    "tuning",
    [
        mosaic.Tuning(programs=1),
        mosaic.Tuning(rows=128, stages=2, buffers=1),
        mosaic.Tuning(stages=6, turns=True, buffers=1),
    ],
)
@pytest.mark.parametrize("make", [glm, fp8])
def test_any_tuning_is_right(make, tuning):
    inputs = make(requests=5, queries=2, positions=1500, visible=(1499, 1, 0, 777, 64))
    assert_close(inputs, jax.jit(partial(mosaic.index_scores, tuning=tuning))(*inputs))


@pytest.mark.parametrize("queries", [1, 8])
def test_runs_are_bitwise_equal(queries):
    """Stages run side by side; a race between them would show as a difference between runs."""
    visible = (20_000, 13_001, 7, 19_968)
    inputs = glm(requests=4, queries=queries, positions=20_008, visible=visible)
    arguments = tuple(jnp.asarray(array) for array in inputs)
    run = jax.jit(partial(index_scores, backend="mosaic"))
    first = np.asarray(run(*arguments))
    for _ in range(20):
        np.testing.assert_array_equal(run(*arguments), first)
    wanted = jax.jit(reference.index_scores)(*arguments)
    np.testing.assert_array_equal(np.isneginf(first), np.isneginf(wanted))
    np.testing.assert_allclose(first, wanted, rtol=1e-5, atol=1e-4)
