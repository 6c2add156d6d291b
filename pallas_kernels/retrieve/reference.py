"""Exact retrieval in plain jnp. It addresses host memory directly, which a CPU can."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.ids import dropping
from pallas_kernels.common.memory_space import as_device


def retrieve(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    rows: Int[Array, " n"],
    targets: Int[Array, " n"],
) -> Int[Array, "S W"]:
    """See `api.retrieve`."""
    records = as_device(host)[jnp.maximum(rows, 0)]
    keep = jnp.where(rows < 0, -1, targets)
    return slots.at[dropping(keep, slots.shape[0])].set(records, mode="drop")
