"""The examples leave products to JAX, whose default on a GPU is TF32: 10 bits of mantissa."""

import jax
import pytest


@pytest.fixture(autouse=True)
def full_products():
    with jax.default_matmul_precision("highest"):
        yield
