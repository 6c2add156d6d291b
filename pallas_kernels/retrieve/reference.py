"""Exact retrieval in plain jnp. It addresses host memory directly, which a CPU can."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.ids import NO_SLOT, dropping, in_range, masked
from pallas_kernels.common.memory_space import as_device
from pallas_kernels.common.rows import records_at
from pallas_kernels.retrieve.types import Fetches, Moves


def retrieve(
    host: Int[Array, "N W"], slots: Int[Array, "S W"], fetches: Fetches, moves: Moves | None
) -> Int[Array, "S W"]:
    """See `api.retrieve`."""
    requests, entries = fetches.positions.shape
    capacity = host.shape[0] // max(requests, 1)
    request = jnp.arange(requests, dtype=jnp.int32)[:, None]
    counted = jnp.arange(entries, dtype=jnp.int32)[None] < fetches.counts[:, None]
    targets = masked(fetches.targets, counted & (fetches.positions != NO_SLOT))
    found = in_range(fetches.positions, capacity)
    rows = masked(request * capacity + fetches.positions, found)
    fetched = records_at(as_device(host), rows.reshape(-1))
    filled = slots.at[dropping(targets.reshape(-1), slots.shape[0])].set(fetched, mode="drop")
    if moves is None:
        return filled
    targets = masked(moves.targets, moves.sources != NO_SLOT)
    moved = records_at(slots, moves.sources)
    return filled.at[dropping(targets, slots.shape[0])].set(moved, mode="drop")
