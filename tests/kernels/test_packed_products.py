"""`packed_products` against float64 NumPy: the reference, and the kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.packed_products import reference, triton
from pallas_kernels.packed_products.api import packed_products
from pallas_kernels.packed_products.cases import CASES, random
from tests.support.assembly import run as executed
from tests.support.lowering import lowered_kernels
from tests.support.products import assert_close, supported


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(reference.packed_products)(*map(jnp.asarray, inputs)))


@pytest.mark.parametrize("name", [name for name, make in CASES.items() if supported(make())])
def test_the_kernel_equals_float64(name):
    inputs = CASES[name]()
    run = jax.jit(partial(triton.packed_products, interpret=True))
    assert_close(inputs, run(*map(jnp.asarray, inputs)))


def test_any_tiling_is_right():
    inputs = random(rows=48, channels=256, counts=(48, 20))
    tuning = triton.Tuning(rows=32, columns=256, depth=32, stages=2, warps=4)
    run = jax.jit(partial(triton.packed_products, tuning=tuning, interpret=True))
    assert_close(inputs, run(*map(jnp.asarray, inputs)))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (CASES["float32"](), "rows of float32"),
        (random(channels=64), "matrices of 64 x 256"),
        (random(depth=192), "matrices of 128 x 192"),
    ],
)
def test_what_the_kernel_refuses_is_an_error_where_it_is_named(inputs, reason):
    with pytest.raises(NotImplementedError, match=reason):
        packed_products(*map(jnp.asarray, inputs), backend="triton")


def test_halved_rows_are_even_then_odd_inputs():
    np.testing.assert_array_equal(reference.halved(jnp.arange(6.0)), [0, 2, 4, 1, 3, 5])


def test_experts_of_v41_are_one_kernel():
    shapes = (
        jax.ShapeDtypeStruct((48, 96, 5120), jnp.bfloat16),
        jax.ShapeDtypeStruct((48, 2304, 2560), jnp.uint8),
        jax.ShapeDtypeStruct((48, 2304, 160), jnp.float8_e8m0fnu),
        jax.ShapeDtypeStruct((48,), jnp.int32),
    )
    assert default_backend("packed_products", "cuda") == "triton"
    assert lowered_kernels(partial(packed_products, backend="triton"), *shapes) == 1


@pytest.mark.parametrize(("shifts", "half"), [(triton.LOW, 0), (triton.HIGH, 4)])
@pytest.mark.parametrize("scale", [67, 120, 127, 187])
def test_the_assembly_unpacks_every_byte(shifts, half, scale):
    """What it does to registers, for every byte; the kernel interpreted does without it."""
    packed = np.arange(256, dtype=np.uint8).view(np.uint32)
    factor = np.full(256, (scale + triton.SHIFT) << triton.MANTISSA, np.uint16).view(np.uint32)
    given = {"$2": packed, "$3": factor[0::2], "$4": factor[1::2]}
    after = executed(triton.assembly(shifts), given)
    found = np.stack([after["$0"], after["$1"]], axis=-1).view(ml_dtypes.bfloat16).reshape(-1)
    numbers = (np.arange(256) >> half & 15).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    wanted = np.ldexp(numbers.astype(np.float64), scale - 127 - triton.SHIFT)
    np.testing.assert_array_equal(found.astype(np.float64), wanted)
