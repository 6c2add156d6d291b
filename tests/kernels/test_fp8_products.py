"""`fp8_products` against float64 NumPy: the reference, and the kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.fp8_products import reference, triton
from pallas_kernels.fp8_products.api import fp8_products
from pallas_kernels.fp8_products.cases import CASES, glm
from tests.support.lowering import lowered_kernels
from tests.support.products import assert_close


def supported(inputs):
    x, numbers, _ = map(jnp.asarray, inputs)
    return triton.supports(x, numbers, triton.Tuning()) is None


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(reference.products)(*map(jnp.asarray, inputs)))


@pytest.mark.parametrize("name", [name for name, make in CASES.items() if supported(make())])
def test_the_kernel_equals_float64(name):
    inputs = CASES[name]()
    run = jax.jit(partial(triton.products, interpret=True))
    assert_close(inputs, run(*map(jnp.asarray, inputs)))


def test_any_tiling_is_right():
    inputs = glm(channels=256)
    tuning = triton.Tuning(columns=128, depth=64, stages=2, warps=8)
    run = jax.jit(partial(triton.products, tuning=tuning, interpret=True))
    assert_close(inputs, run(*map(jnp.asarray, inputs)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("float32", "rows of float32"), ("odd_sizes", "rows of float32"), ("one_row", "1 rows")],
)
def test_what_the_kernel_refuses_is_an_error_where_it_is_named(name, reason):
    with pytest.raises(NotImplementedError, match=reason):
        fp8_products(*map(jnp.asarray, CASES[name]()), backend="triton")


def test_experts_of_glm_are_one_kernel():
    shapes = (
        jax.ShapeDtypeStruct((32, 32, 6144), jnp.bfloat16),
        jax.ShapeDtypeStruct((32, 4096, 6144), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((32, 4096), jnp.float32),
    )
    assert default_backend("fp8_products", "cuda") == "triton"
    assert lowered_kernels(partial(fp8_products, backend="triton"), *shapes) == 1
