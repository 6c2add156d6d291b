"""Plan: look-up, deduplication and victim choice. Integers only, no record is touched."""

from pallas_kernels.plan import reference
from pallas_kernels.plan.types import PlanInput, PlanResult, PlanTables


def plan(
    wanted: PlanInput, tables: PlanTables, *, page_slots: int
) -> tuple[PlanResult, PlanTables]:
    """Decide where every selected record is read from, and what is fetched into which slot.

    1. The working set is the union of the selections of all T queries; each of its positions is a
       hit (it has a hot slot), else in the tail, else a miss.
    2. A miss takes an empty slot of the request's pages, else the slot that was used longest ago
       and is not in the working set, else a staging slot: no selected position is ever dropped.
    3. What is left of the victims takes the retiring positions that had no hot slot before the
       plan, which cost no fetch.

    Misses take their slots in ascending order of position, and after them retiring positions in the
    order given. Empty slots come in the order of the request's page list, then used ones by mark,
    equal marks in the order of the page list again: the result is a function of its inputs alone.

    Args:
        wanted: the selections and the places that a request may use.
        tables: look-up tables, updated as if the fetches had been done.
        page_slots: slots per page.

    Returns:
        The plan, and the tables after it. Every slot of the plan is distinct within its request.
    """
    return reference.plan(wanted, tables, page_slots=page_slots)
