"""Whether rows were rounded to 8 bits as they should be."""

import numpy as np


def assert_rounded(rows, numbers, scales, near=1e-5):
    """The largest of each row is 448, and no number is off by more than half a step.

    Numbers that are computed before they are rounded may be off by `near` of a step more.
    """
    assert (numbers.shape, scales.shape) == (rows.shape, rows.shape[:-1])
    exact, scale = np.asarray(rows, np.float64), np.asarray(scales, np.float64)[..., None]
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    wanted = np.where(largest > 0, largest / 448, scale)
    np.testing.assert_allclose(scale, wanted, rtol=max(1e-6, near / 50))
    found = np.asarray(numbers, np.float64)
    assert np.isfinite(found).all()
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact / scale), 2.0**-6))) - 3)
    assert (np.abs(found - exact / scale) <= step / 2 * (1 + near)).all()
