"""Exact backup in plain jnp. It addresses host memory directly, which a CPU can."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.ids import dropping
from pallas_kernels.common.memory_space import as_device, as_host, is_host


def backup(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    rows: Int[Array, " n"],
    sources: Int[Array, " n"],
) -> Int[Array, "N W"]:
    """See `api.backup`."""
    records = slots[jnp.maximum(sources, 0)]
    keep = jnp.where(sources < 0, -1, rows)
    written = as_device(host).at[dropping(keep, host.shape[0])].set(records, mode="drop")
    return as_host(written) if is_host(host) else written
