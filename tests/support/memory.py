"""Host pools for tests."""

import jax
import jax.numpy as jnp

from dhisparse_jax.hierarchy.state import host_sharding


def on_host(words):
    """A host pool. By way of a JAX array: an alias of NumPy's memory could not be donated."""
    return jax.device_put(jnp.array(words), host_sharding())
