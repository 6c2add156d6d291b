"""Retrieval: host records to device slots, and slots to other slots, in one go."""

from jaxtyping import Array, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.retrieve import reference, triton
from pallas_kernels.retrieve.types import Fetches, Moves


def retrieve(
    host: Int[Array, "N _"],
    slots: Int[Array, "S W"],
    fetches: Fetches,
    moves: Moves | None = None,
    *,
    backend: Backend | None = None,
) -> Int[Array, "S W"]:
    """Copy records into slots, bit exact: each request's from its part of the host pool, and moves.

    Lists may be empty. An entry with NO_SLOT on either side does nothing. Ids that are out of range
    never read or write anything else:

    - a position that the request does not have, or a source that is no slot, leaves POISON in the
      target: NaN in every row format, so it cannot pass for a record;
    - a target that is no slot receives nothing.

    A record may be fetched into several slots. Targets are distinct: a slot that two entries with
    different records name holds one of them, or parts of both. `plan` never makes such a list.

    Args:
        host: the host pool, int32 words; may be of memory kind `pinned_host`. Position p of request
            r is row r * C + p, with C rows for each request of `fetches`. Any size: offsets are 64
            bit.
        slots: the device slots, donated by the caller's `jit`.
        fetches: what to fetch; the time goes with its counts, not with its size.
        moves: what to copy from slot to slot; none by default.
        backend: the implementation; by default the one for the device JAX runs on.

    Returns:
        `slots` with the records in place; other slots are unchanged.

    Raises:
        ValueError: the host pool cannot be divided among the requests, or its records and the slots
            are of different sizes.
    """
    check_pools(host, slots, fetches)
    match resolve("retrieve", backend, refusal=None):
        case "triton":
            return triton.retrieve(host, slots, fetches, moves)
        case _:
            return reference.retrieve(host, slots, fetches, moves)


def check_pools(host: Int[Array, "N _"], slots: Int[Array, "S W"], fetches: Fetches) -> None:
    """Whether the requests can fetch from the host pool into the slots.

    Raises:
        ValueError: see `retrieve`.
    """
    requests = fetches.positions.shape[0]
    if host.shape[0] % max(requests, 1) or host.shape[1] != slots.shape[1]:
        raise ValueError(
            f"{requests} requests cannot fetch from a host pool of {host.shape} words into slots "
            f"of {slots.shape[1]}; every request needs as many records, of the size of a slot"
        )
