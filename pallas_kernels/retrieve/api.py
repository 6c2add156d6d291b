"""Retrieval: host records to device slots."""

from jaxtyping import Array, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.retrieve import reference, triton


def retrieve(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    rows: Int[Array, " n"],
    targets: Int[Array, " n"],
    *,
    backend: Backend | None = None,
) -> Int[Array, "S W"]:
    """Copy host record `rows[i]` into slot `targets[i]`, bit exact.

    Args:
        host: the host pool, int32 words; may be of memory kind `pinned_host`.
        slots: the device slots, donated by the caller's `jit`.
        rows: int32 host rows; NO_SLOT skips the entry.
        targets: int32 slots, distinct among the entries that are not skipped; NO_SLOT skips.
        backend: the implementation; by default the one for the device JAX runs on.

    Returns:
        `slots` with the records in place; other slots are unchanged.
    """
    match resolve("retrieve", backend, refusals={"triton": None}):
        case "triton":
            return triton.retrieve(host, slots, rows, targets)
        case "reference":
            return reference.retrieve(host, slots, rows, targets)
