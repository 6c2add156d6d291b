"""Plan: look-up, deduplication and victim choice. Integers only, no record is touched."""

import jax

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.plan import reference, triton
from pallas_kernels.plan.types import PlanInput, PlanResult, PlanTables

# Traced and lowered once for all groups of layers: see `sparse_attention.api`.
_triton = jax.jit(triton.plan, static_argnames="page_slots")


def plan(
    wanted: PlanInput, tables: PlanTables, *, page_slots: int, backend: Backend | None = None
) -> tuple[PlanResult, PlanTables]:
    """Decide where every selected record is read from, and what is fetched into which slot.

    1. The working set is the union of the selections of all T queries; each of its positions is a
       hit (it has a hot slot), else in the tail, else a miss.
    2. The victims are slots of the request's pages outside the working set: empty ones first, then
       those that were used longest ago (exact LRU), equal ones in the order of the page list. There
       are as many as there are misses and retiring positions without a hot slot, while they last.
    3. Victims are handed out in the order of the page list. Misses take theirs first, in the order
       in which the queries name them; a miss without one takes a staging slot, so no selected
       position is ever dropped. Retiring positions, which cost no fetch, take what is left.

    The result is a function of its inputs alone, and the same from every backend. A position may be
    selected any number of times, by one query or by several. What is outside the tables is taken as
    NO_SLOT: nothing is planned for it, and its location is NO_SLOT.

    Args:
        wanted: the selections and the places that a request may use. Staging and tail slots lie
            beyond the page slots, which are those that the tables have entries for. Retiring
            positions are in the tail, which ends with the newest position that may be selected.
        tables: look-up tables, updated as if the fetches had been done. Marks lie in the past, less
            than 2**30 steps ago.
        page_slots: slots per page.
        backend: the implementation; by default the one for the device JAX runs on, as far as
            `triton.supports` it.

    Returns:
        The plan, and the tables after it. Every slot of the plan is distinct within its request.
    """
    refusal = triton.supports(*tables.slot_of.shape)
    match resolve("plan", backend, refusal=refusal):
        case "triton":
            return _triton(wanted, tables, page_slots=page_slots)
        case _:
            return reference.plan(wanted, tables, page_slots=page_slots)
