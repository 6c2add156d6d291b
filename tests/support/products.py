"""What products with packed matrices must be, in float64."""

import jax.numpy as jnp
import numpy as np

from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.models.quantised import dequantise
from pallas_kernels.packed_products import triton


def supported(inputs):
    """Whether the kernel takes them."""
    return triton.supports(*map(jnp.asarray, inputs[:3])) is None


def assert_close(inputs, found):
    """Rows that there are: within the rounding of the result, and of float32 sums."""
    x, numbers, scales, counts = inputs
    assert found.dtype == x.dtype
    rounding = 2.0**-8 if x.dtype != np.float32 else 2.0**-23
    for rows, packed, scale, count, seen in zip(x, numbers, scales, counts, found, strict=True):
        matrix = dequantise(packed, scale, FORMATS["fp4"]).astype(np.float64)
        matrix = np.concatenate((matrix[:, 0::2], matrix[:, 1::2]), axis=1)
        rows = rows[:count].astype(np.float64)
        wanted = rows @ matrix.T
        bound = rounding * abs(wanted) + x.shape[2] * 2.0**-24 * (abs(rows) @ abs(matrix).T)
        assert (abs(np.asarray(seen, np.float64)[:count] - wanted) <= bound).all()
