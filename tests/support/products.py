"""What fp8 products must be, in float64."""

import numpy as np


def assert_close(inputs, found):
    """Within the rounding of the result, and of float32 sums."""
    x, numbers, scale = (np.asarray(part, np.float64) for part in inputs)
    wanted = np.einsum("emk,enk->emn", x, numbers) * scale[:, None]
    size = np.einsum("emk,enk->emn", abs(x), abs(numbers)) * scale[:, None]
    assert found.dtype == inputs.x.dtype
    rounding = 2.0**-8 if inputs.x.dtype != np.float32 else 2.0**-23
    error = abs(np.asarray(found, np.float64) - wanted)
    assert (error <= rounding * abs(wanted) + x.shape[2] * 2.0**-24 * size).all()
