"""What the retrieve operation takes beside the records. Plain tuples of arrays."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT, masked


class Fetches(NamedTuple):
    """Host records to fetch, by request: the first `counts` entries of a list, below 2**31 in all.

    They are named by their rows in the pool, not by positions: where a position lies is the
    caller's business, and the kernels need no table of it.

    Attributes:
        rows: int32 record of the host pool, from 0; NO_SLOT skips the entry.
        targets: int32 slot that receives it; NO_SLOT skips the entry.
        counts: int32 entries of each list that count; the others are not read.
    """

    rows: Int[Array, "R n"]
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
    entry = jnp.arange(fetches.rows.shape[1], dtype=jnp.int32)
    return entry[None] < fetches.counts[:, None]


def wanted_targets(fetches: Fetches) -> Int[Array, "R n"]:
    """Slot of every entry, NO_SLOT where nothing is to be done."""
    return masked(fetches.targets, counted(fetches) & (fetches.rows != NO_SLOT))
