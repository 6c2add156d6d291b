"""Exact backup in plain jnp. It addresses host memory directly, which a CPU can."""

from collections.abc import Sequence

from jaxtyping import Array, Int

from pallas_kernels.common.ids import NO_SLOT, dropping, masked
from pallas_kernels.common.memory_space import as_device, as_host, is_host
from pallas_kernels.common.rows import records_at


def backup(
    hosts: Sequence[Int[Array, "_ *_"]],
    slots: Sequence[Int[Array, "_ *_"]],
    rows: Int[Array, " n"],
    sources: Int[Array, "pools n"],
) -> tuple[Int[Array, "_ *_"], ...]:
    """See `api.backup`."""
    each = zip(hosts, slots, sources, strict=True)
    return tuple(_one_pool(host, slots, rows, sources) for host, slots, sources in each)


def _one_pool(
    host: Int[Array, "N *W"],
    slots: Int[Array, "S *W"],
    rows: Int[Array, " n"],
    sources: Int[Array, " n"],
) -> Int[Array, "N *W"]:
    place = dropping(masked(rows, sources != NO_SLOT), host.shape[0])
    written = as_device(host).at[place].set(records_at(slots, sources), mode="drop")
    return as_host(written) if is_host(host) else written
