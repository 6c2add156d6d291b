"""`packed_products`, `round_rows` and `sinkhorn` on a GPU, against float64 and the references."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_products import cases, reference
from pallas_kernels.packed_products.api import packed_products
from pallas_kernels.round_rows import cases as rounding_cases
from pallas_kernels.round_rows.api import round_gated, round_rows
from pallas_kernels.sinkhorn import cases as sinkhorn_cases
from pallas_kernels.sinkhorn import reference as sinkhorn_reference
from pallas_kernels.sinkhorn.api import sinkhorn
from tests.support.products import assert_close, supported
from tests.support.rounding import assert_rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("name", [name for name, make in cases.CASES.items() if supported(make())])
def test_packed_products(name):
    inputs = cases.CASES[name]()
    run = jax.jit(partial(packed_products, backend="triton"))
    assert_close(inputs, run(*map(jnp.asarray, inputs)))


@pytest.mark.parametrize(("depth", "channels"), [(5120, 2304), (2304, 5120)])
def test_packed_products_of_v41(depth, channels):
    counts = (96, 48, 1, 0)
    inputs = cases.random(matrices=4, rows=96, depth=depth, channels=channels, counts=counts)
    operands = [jnp.asarray(part) for part in inputs]
    found = jax.jit(partial(packed_products, backend="triton"))(*operands)
    wanted = jax.jit(reference.packed_products)(*operands)
    for expert, count in enumerate(filter(None, counts)):
        one, other = (np.asarray(each[expert, :count], np.float32) for each in (found, wanted))
        np.testing.assert_allclose(one, other, rtol=2.0**-7, atol=2.0**-7 * np.abs(other).std())


@pytest.mark.parametrize("name", sinkhorn_cases.CASES)
def test_sinkhorn(name):
    options = {"steps": sinkhorn_cases.STEPS, "epsilon": sinkhorn_cases.EPSILON}
    logits = jnp.asarray(sinkhorn_cases.CASES[name]())
    found = jax.jit(partial(sinkhorn, backend="triton", **options))(logits)
    wanted = jax.jit(partial(sinkhorn_reference.sinkhorn, **options))(logits)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", rounding_cases.CASES)
def test_round_rows(name):
    rows = rounding_cases.CASES[name]()
    run = jax.jit(partial(round_rows, backend="triton"))
    assert_rounded(rows, *run(jnp.asarray(rows)))


@pytest.mark.parametrize("name", rounding_cases.GATED)
def test_round_gated(name):
    given = rounding_cases.GATED[name]()
    run = jax.jit(partial(round_gated, backend="triton"))
    assert_rounded(given.exact(), *run(*map(jnp.asarray, given)), near=1e-4)
