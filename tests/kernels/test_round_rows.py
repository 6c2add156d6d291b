"""`round_rows` against float64 NumPy: the reference, and the kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.round_rows import reference, triton
from pallas_kernels.round_rows.api import round_gated, round_rows
from pallas_kernels.round_rows.cases import CASES, GATED
from tests.support.lowering import lowered_kernels
from tests.support.rounding import assert_rounded


@pytest.mark.parametrize("name", CASES)
def test_the_reference_rounds_to_the_nearest(name):
    rows = CASES[name]()
    assert_rounded(rows, *jax.jit(reference.round_rows)(jnp.asarray(rows)))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_rounds_to_the_nearest(name):
    rows = CASES[name]()
    assert_rounded(rows, *jax.jit(partial(triton.round_rows, interpret=True))(jnp.asarray(rows)))


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(
    "run", [reference.round_gated, partial(triton.round_gated, interpret=True)]
)
def test_gated_rows_are_rounded_to_the_nearest(name, run):
    given = GATED[name]()
    assert_rounded(given.exact(), *jax.jit(run)(*map(jnp.asarray, given)), near=1e-4)


def test_a_matrix_has_its_own_scales():
    given = GATED["of_experts"]()
    mixed = given._replace(columns=given.columns[::-1])
    with pytest.raises(AssertionError):
        assert_rounded(given.exact(), *round_gated(*map(jnp.asarray, mixed)), near=1e-4)


def test_a_wrong_scale_is_noticed():
    rows = CASES["odd_width"]()
    numbers, scales = reference.round_rows(jnp.asarray(rows))
    with pytest.raises(AssertionError):
        assert_rounded(rows, numbers, scales * 1.5)
    with pytest.raises(AssertionError):
        assert_rounded(rows, numbers[::-1], scales)


def test_what_the_kernel_refuses_is_an_error_where_it_is_named():
    with pytest.raises(NotImplementedError, match="rows of float16"):
        round_rows(jnp.zeros((1, 9), jnp.float16), backend="triton")


def test_it_is_one_kernel():
    shape = jax.ShapeDtypeStruct((16, 8, 6144), ml_dtypes.bfloat16)
    assert default_backend("round_rows", "cuda") == "triton"
    assert lowered_kernels(partial(round_rows, backend="triton"), shape) == 1
