"""What tests of sparse attention share: a float64 oracle, and how to run a case."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.sparse_attention.api import sparse_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def attended(inputs):
    query, rows = inputs.query.astype(np.float64), inputs.rows.astype(np.float64)
    values = np.zeros((*query.shape[:3], inputs.value_width))
    lse = np.full(query.shape[:3], -np.inf)
    for request, t, head in np.ndindex(*query.shape[:3]):
        location = inputs.location[request, t]
        selected = rows[location[location >= 0]]
        logits = inputs.scale * selected @ query[request, t, head]
        sink = [] if inputs.sinks is None else [np.float64(inputs.sinks[head])]
        every = np.concatenate([logits, sink])
        if len(every):
            weights = np.exp(every - every.max())
            share = weights[: len(logits)] / weights.sum()
            values[request, t, head] = share @ selected[:, : inputs.value_width]
            lse[request, t, head] = every.max() + np.log(weights.sum())
    return values, lse


def options(inputs):
    return {
        name: getattr(inputs, name) for name in ("offset", "row_format", "value_width", "scale")
    }


def arguments(inputs):
    given = (inputs.query, inputs.slots, inputs.location)
    return given if inputs.sinks is None else (*given, inputs.sinks)


def run(inputs, attend=sparse_attention, **more):
    values, lse = jax.jit(partial(attend, **options(inputs), **more))(*arguments(inputs))
    return np.asarray(values), np.asarray(lse)


def assert_close(inputs, found):
    values, lse = found
    assert values.dtype == inputs.query.dtype
    assert lse.dtype == np.float32
    exact = inputs.query.dtype == np.float32 and not isinstance(inputs.row_format, ScaledRow)
    near = dict.fromkeys(("rtol", "atol"), TOLERANCE["float32" if exact else "bfloat16"])
    wanted, wanted_lse = attended(inputs)
    np.testing.assert_allclose(values.astype(np.float64), wanted, **near)
    np.testing.assert_allclose(lse, wanted_lse, **near)
    if not exact:
        # Element by element bfloat16 is coarse; in the norm an error of one row stands out.
        error = np.linalg.norm(values.astype(np.float64) - wanted)
        assert error <= 6e-3 * np.linalg.norm(wanted) + 1e-12
    assert jnp.isfinite(jnp.asarray(values, jnp.float32)).all()
