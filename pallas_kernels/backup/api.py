"""Backup: device slots to host records."""

from jaxtyping import Array, Int

from pallas_kernels.backup import reference, triton
from pallas_kernels.common.backends import Backend, resolve


def backup(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    rows: Int[Array, " n"],
    sources: Int[Array, " n"],
    *,
    backend: Backend | None = None,
) -> Int[Array, "N W"]:
    """Copy slot `sources[i]` into host record `rows[i]`, bit exact; in place if `host` is donated.

    Args:
        host: the host pool, int32 words; may be of memory kind `pinned_host`.
        slots: device records.
        rows: int32 host rows, distinct among the entries that are not skipped; NO_SLOT skips.
        sources: int32 slots; NO_SLOT skips the entry.
        backend: the implementation; by default the one for the device JAX runs on.

    Returns:
        `host`, in its memory kind, with the records in place; other rows are unchanged.
    """
    match resolve("backup", backend, refusals={"triton": None}):
        case "triton":
            return triton.backup(host, slots, rows, sources)
        case "reference":
            return reference.backup(host, slots, rows, sources)
