"""What tests of retrieval and attention in one launch share: how to run a case, exact equality."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.retrieve_attend import api, mosaic
from tests.support.attention import options
from tests.support.memory import on_host


def arguments(inputs):
    """Operands on the device, the pool on the host; the slots may be donated."""
    query, location = inputs.after.query, inputs.after.location
    attention = api.Attention(query, location, inputs.selection, inputs.missing)
    rest = jax.tree.map(jnp.array, (inputs.slots, inputs.fetches, attention, inputs.moves))
    return on_host(inputs.host), *rest


def run_fused(inputs, call=api.retrieve_attend, **more):
    """Values, log-sum-exp and slots after `call`, by default the operation."""
    given = partial(call, **options(inputs.after), **more)
    (values, lse), slots = jax.jit(given, donate_argnums=1)(*arguments(inputs))
    return np.asarray(values), np.asarray(lse), np.asarray(slots)


def refusal(inputs):
    """Why the kernel does not take a case, if it does not."""
    query, slots = inputs.after.query, inputs.slots
    how = {name: value for name, value in options(inputs.after).items() if name != "scale"}
    return mosaic.supports(jnp.asarray(query), jnp.asarray(slots), **how)


def assert_same(found, wanted):
    """Equal bit by bit, but that one NaN is as good as another."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(_bits(one), _bits(other))


def _bits(array):
    if array.dtype != np.int32:
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
    return array.view(f"uint{8 * array.dtype.itemsize}")
