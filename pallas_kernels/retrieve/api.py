"""Retrieval: host records to device slots."""

from jaxtyping import Array, Int

from pallas_kernels.retrieve import reference


def retrieve(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    rows: Int[Array, " n"],
    targets: Int[Array, " n"],
) -> Int[Array, "S W"]:
    """Copy host record `rows[i]` into slot `targets[i]`, bit exact.

    Args:
        host: the host pool, int32 words; may be of memory kind `pinned_host`.
        slots: the device slots, donated by the caller's `jit`.
        rows: int32 host rows; NO_SLOT skips the entry.
        targets: int32 slots, distinct among the entries that are not skipped; NO_SLOT skips.

    Returns:
        `slots` with the records in place; other slots are unchanged.
    """
    return reference.retrieve(host, slots, rows, targets)
