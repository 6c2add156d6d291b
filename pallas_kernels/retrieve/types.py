"""What the retrieve operation takes beside the records. Plain tuples of arrays."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT, in_range, masked


class Fetches(NamedTuple):
    """Host records to fetch, by request: the first `counts` entries of a row, below 2**31 in all.

    Attributes:
        positions: int32 record of the request, from 0; NO_SLOT skips the entry.
        targets: int32 slot that receives it; NO_SLOT skips the entry.
        counts: int32 entries of each row that count; the others are not read.
    """

    positions: Int[Array, "R n"]
    targets: Int[Array, "R n"]
    counts: Int[Array, " R"]


class Moves(NamedTuple):
    """Slots to copy to other slots.

    Attributes:
        sources: int32 slots, none of which is a target of the same call; NO_SLOT skips the entry.
        targets: int32 slots; NO_SLOT skips the entry.
    """

    sources: Int[Array, " m"]
    targets: Int[Array, " m"]


def counted(fetches: Fetches) -> Bool[Array, "R n"]:
    """Which entries count."""
    entry = jnp.arange(fetches.positions.shape[1], dtype=jnp.int32)
    return entry[None] < fetches.counts[:, None]


def located(fetches: Fetches, records: int) -> tuple[Int[Array, "R n"], Int[Array, "R n"]]:
    """Host row and slot of every entry, with `records` rows for all requests together.

    The row is NO_SLOT where the request has no such position, the slot where nothing is to be done.
    """
    requests, _ = fetches.positions.shape
    capacity = records // max(requests, 1)
    request = jnp.arange(requests, dtype=jnp.int32)[:, None]
    rows = request * capacity + fetches.positions
    wanted = counted(fetches) & (fetches.positions != NO_SLOT)
    return masked(rows, in_range(fetches.positions, capacity)), masked(fetches.targets, wanted)
