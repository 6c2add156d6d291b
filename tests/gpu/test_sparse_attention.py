"""The Mosaic kernel of sparse attention as it runs on a GPU, against float64 NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention import mosaic
from pallas_kernels.sparse_attention.cases import CASES, fp8, glm, v4
from tests.support.attention import assert_close, options, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]


def supported(inputs):
    refusal = mosaic.supports(
        jnp.asarray(inputs.query),
        jnp.asarray(inputs.slots),
        **{name: value for name, value in options(inputs).items() if name != "scale"},
    )
    return refusal is None


@pytest.mark.parametrize("name", CASES)
def test_shared_cases(name):
    inputs = CASES[name]()
    if not supported(inputs):
        pytest.skip("float32 or odd sizes: the kernel says so")
    assert_close(inputs, run(inputs, backend="mosaic"))


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("rows", [glm, fp8, v4])
def test_any_split_is_right(rows, splits):
    # With 8 splits request 1, which selects 3 rows, has parts that select nothing.
    inputs = rows(heads=64, requests=3, top_k=1000, slots=1500, selected=(1000, 3, 0), queries=2)
    tuning = mosaic.Tuning(splits=splits)
    assert_close(inputs, run(inputs, partial(mosaic.sparse_attention, tuning=tuning)))


def test_more_heads_than_a_cuda_block_holds():
    inputs = glm(heads=2 * mosaic.HEADS + 3, top_k=200, slots=300, selected=(200, 70))
    assert_close(inputs, run(inputs, backend="mosaic"))


def test_runs_are_bitwise_equal():
    """Stages run side by side; a race between them would show as a difference between runs."""
    inputs = glm(heads=64, requests=64, top_k=2048, slots=4096, selected=(2048,) * 64)
    first = run(inputs, backend="mosaic")
    for _ in range(20):
        again = run(inputs, backend="mosaic")
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
