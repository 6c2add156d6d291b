"""Exact retrieval in plain jnp. It addresses host memory directly, which a CPU can."""

from jaxtyping import Array, Int

from pallas_kernels.common.ids import NO_SLOT, dropping, masked
from pallas_kernels.common.memory_space import as_device
from pallas_kernels.common.rows import records_at
from pallas_kernels.retrieve.types import Fetches, Moves, wanted_targets


def retrieve(
    host: Int[Array, "N *W"], slots: Int[Array, "S *W"], fetches: Fetches, moves: Moves | None
) -> Int[Array, "S *W"]:
    """See `api.retrieve`."""
    fetched = records_at(as_device(host), fetches.rows.reshape(-1))
    targets = dropping(wanted_targets(fetches).reshape(-1), slots.shape[0])
    filled = slots.at[targets].set(fetched, mode="drop")
    if moves is None:
        return filled
    targets = masked(moves.targets, moves.sources != NO_SLOT)
    moved = records_at(slots, moves.sources)
    return filled.at[dropping(targets, slots.shape[0])].set(moved, mode="drop")
