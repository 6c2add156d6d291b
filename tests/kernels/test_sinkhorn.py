"""`sinkhorn` against float64 NumPy: the reference, and the kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.sinkhorn import reference, triton
from pallas_kernels.sinkhorn.api import sinkhorn
from pallas_kernels.sinkhorn.cases import CASES, EPSILON, STEPS
from tests.support.lowering import lowered_kernels

OPTIONS = {"steps": STEPS, "epsilon": EPSILON}


def exact(logits):
    """From the formulas, in float64."""
    carry = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    carry = carry / carry.sum(axis=-1, keepdims=True) + EPSILON
    carry /= carry.sum(axis=-2, keepdims=True) + EPSILON
    for _ in range(STEPS - 1):
        carry /= carry.sum(axis=-1, keepdims=True) + EPSILON
        carry /= carry.sum(axis=-2, keepdims=True) + EPSILON
    return carry


def check(run, name):
    logits = CASES[name]()
    found = jax.jit(partial(run, **OPTIONS))(jnp.asarray(logits))
    assert found.shape == logits.shape
    np.testing.assert_allclose(found, exact(logits), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_float64(name):
    check(reference.sinkhorn, name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "more_than_a_warp" else pytest.mark.slow) for n in CASES],
)
def test_the_kernel_equals_float64(name):
    check(partial(triton.sinkhorn, interpret=True), name)


def test_what_the_kernel_refuses_is_an_error_where_it_is_named():
    with pytest.raises(NotImplementedError, match="matrices of 9 rows"):
        sinkhorn(jnp.zeros((1, 9, 9)), **OPTIONS, backend="triton")


def test_all_steps_are_one_kernel():
    shape = jax.ShapeDtypeStruct((64, 6, 4, 4), jnp.float32)
    assert default_backend("sinkhorn", "cuda") == "triton"
    assert lowered_kernels(partial(sinkhorn, **OPTIONS, backend="triton"), shape) == 1
