"""Backup: device slots to the host records of several pools, in one go."""

from collections.abc import Sequence

from jaxtyping import Array, Int

from pallas_kernels.backup import reference, tpu, triton
from pallas_kernels.common import tpu_records
from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.common.record_layout import words_of_record

Pools = tuple[Int[Array, "_ *_"], ...]
"""Arrays of records, each with its own size of a record."""


def backup(
    hosts: Sequence[Int[Array, "_ *_"]],
    slots: Sequence[Int[Array, "_ *_"]],
    rows: Int[Array, " n"],
    sources: Int[Array, "pools n"],
    *,
    backend: Backend | None = None,
) -> Pools:
    """Copy slot `sources[p, i]` into record `rows[i]` of every host pool p, bit exact.

    In place if the pools are donated, and one kernel for all of them (with jax before 0.11.2 one
    for each). Pools may have records of different sizes. Lists may be empty. An entry with NO_SLOT
    on either side does nothing. Ids that are out of range never read or write anything else:

    - a source that is no slot leaves POISON in the record: NaN in every row format, so it cannot
      pass for a record;
    - a row that the pool does not have receives nothing.

    A slot may be written to several rows. Rows are distinct: one that two entries with different
    records name holds one of them, or parts of both.

    Args:
        hosts: the host pools, int32 words; may be of memory kind `pinned_host`. Any size: offsets
            are 64 bit.
        slots: device records for each pool; pools may share an array.
        rows: int32 host rows, the same in every pool; NO_SLOT skips.
        sources: int32 slots, a row for each pool; NO_SLOT skips the entry.
        backend: the implementation; by default the one for the device JAX runs on.

    Returns:
        `hosts`, in their memory kinds, with the records in place; other rows are unchanged.

    Raises:
        ValueError: not as many slot arrays or lists of sources as host pools, or records of a pool
            and its slots are of different sizes.
    """
    widths, wanted = ([words_of_record(pool) for pool in pools] for pools in (slots, hosts))
    if widths != wanted or sources.shape[0] != len(hosts):
        raise ValueError(
            f"host pools with records of {wanted} words cannot be written from slots of {widths} "
            f"and {sources.shape[0]} lists of sources; there must be one of each, of the same size"
        )
    refusal = tpu_records.supports(*hosts, *slots)
    match resolve("backup", backend, refusal=None, tpu_refusal=refusal):
        case "tpu":
            return tpu.backup(hosts, slots, rows, sources)
        case "triton":
            return triton.backup(hosts, slots, rows, sources)
        case _:
            return reference.backup(hosts, slots, rows, sources)
