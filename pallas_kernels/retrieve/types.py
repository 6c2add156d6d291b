"""What the retrieve operation takes beside the records. Plain tuples of arrays."""

from typing import NamedTuple

from jaxtyping import Array, Int


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
