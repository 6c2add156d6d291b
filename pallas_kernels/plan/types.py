"""What the plan operation takes and returns. Plain tuples of arrays."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Tail(NamedTuple):
    """The rings that hold the newest positions: `position` in slot `first + position % length`.

    Attributes:
        start: int32 first position that each ring holds; it holds all that follow, up to `length`.
        first: int32 first slot of each ring.
        length: int32 scalar, slots of a ring.
    """

    start: Int[Array, " R"]
    first: Int[Array, " R"]
    length: Int[Array, ""]


class PlanInput(NamedTuple):
    """What one step wants from one pool. R requests, T queries, K selected positions each.

    Attributes:
        selection: int32 selected positions of every query, NO_SLOT where there are fewer than K.
        tail: where the newest positions are.
        retiring: int32 positions about to leave the tail, to be kept on device if there is room.
        staging: int32 slots that take the misses for which no hot slot is left.
        pages: int32 pages that each request holds in this pool, NO_SLOT after the last.
        step: int32 scalar, grows by at least one from step to step.
    """

    selection: Int[Array, "R T K"]
    tail: Tail
    retiring: Int[Array, "R Q"]
    staging: Int[Array, "R G"]
    pages: Int[Array, "R Pmax"]
    step: Int[Array, ""]


class PlanTables(NamedTuple):
    """The tables that a plan reads and updates.

    Attributes:
        slot_of: int32 hot slot of every position of every request, NO_SLOT if it has none.
        position: int32 position that each hot slot holds, NO_SLOT if it is empty.
        mark: int32 step at which each hot slot was last used.
    """

    slot_of: Int[Array, "R C"]
    position: Int[Array, " slots"]
    mark: Int[Array, " slots"]


class PlanCounts(NamedTuple):
    """Records per request: selected = hit + tail + fetched; staged is a part of fetched.

    Attributes:
        selected: of the union of all queries.
        hit: those with a hot slot.
        tail: those in the tail.
        fetched: those that are missing.
        staged: of these, those for which the budget has no slot.
    """

    selected: Int[Array, " R"]
    hit: Int[Array, " R"]
    tail: Int[Array, " R"]
    fetched: Int[Array, " R"]
    staged: Int[Array, " R"]


class PlanResult(NamedTuple):
    """The plan: where each selected record is, and what to move first. U = T * K.

    Attributes:
        location: int32 slot of each selected position; NO_SLOT where `selection` has none.
        fetch_position: int32 positions to fetch from the host, each once: the first
            `counts.fetched` of a row, NO_SLOT after them.
        fetch_slot: int32 slot that receives each of them.
        fetch_evicted: int32 position that the slot held until now; NO_SLOT if it was empty, and for
            a staging slot.
        retire_position: the positions of `retiring` that get a hot slot; NO_SLOT skips.
        retire_slot: int32 slot that receives each of them.
        retire_evicted: int32 position that the slot held until now, NO_SLOT if it was empty.
        held: int32 slots of a request that hold something after it.
        counts: what the plan found.
    """

    location: Int[Array, "R T K"]
    fetch_position: Int[Array, "R U"]
    fetch_slot: Int[Array, "R U"]
    fetch_evicted: Int[Array, "R U"]
    retire_position: Int[Array, "R Q"]
    retire_slot: Int[Array, "R Q"]
    retire_evicted: Int[Array, "R Q"]
    held: Int[Array, " R"]
    counts: PlanCounts
