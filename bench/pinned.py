"""Pinned memory: what of it the allocator of a GPU's host arrays needs.

XLA's allocator takes pinned memory in regions, each twice as large as the one before (or as the
array that asks), and the last one as large as its limit lets it be; what is left of a region stays
for smaller arrays. So the limit has to be larger than the arrays, by how they fall into regions,
and all of it is taken from the machine.
"""

from collections.abc import Sequence

FIRST = 2**20
"""Bytes of the first region."""


def placed(arrays: Sequence[int], limit: int) -> bool:
    """Whether arrays of so many bytes find room, made in this order, under a limit in bytes.

    Each goes where least is left. Arrays of 3, 3 and 2 GiB get regions of 4 and 8 GiB under a limit
    of 12: the third lies behind the second.
    """
    left, region, taken = list[int](), FIRST, 0
    for size in arrays:
        fitting = [free for free in left if free >= size]
        if not fitting:
            while region < size:
                region *= 2
            own = min(region, limit - taken)
            if own < size:
                return False
            taken, region = taken + own, 2 * region
            left.append(own)
            fitting = [own]
        best = min(fitting)
        left.remove(best)
        left.append(best - size)
    return True
