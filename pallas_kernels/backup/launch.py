"""How many launches a backup is, and what its kernels share: the same on a GPU and on a TPU."""

from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Int

from pallas_kernels.common.memory_space import is_host

SEVERAL_RESULTS = jax.__version_info__ >= (0, 11, 2)
"""XLA before that follows host memory into the only result of a kernel; with more it aborts."""

Pools = tuple[Int[Array, "_ *_"], ...]


def launched(
    launch: Callable[[Sequence[jax.Array], Sequence[jax.Array], Int[Array, "pools n"]], Pools],
    hosts: Sequence[Int[Array, "_ *_"]],
    slots: Sequence[Int[Array, "_ *_"]],
    sources: Int[Array, "pools n"],
) -> Pools:
    """What `launch(hosts, slots, sources)` gives; called for each pool where XLA needs that."""
    if not sources.size:
        return tuple(hosts)
    if SEVERAL_RESULTS:
        return launch(hosts, slots, sources)
    each = zip(hosts, slots, sources, strict=True)
    return tuple(launch([host], [array], ids[None])[0] for host, array, ids in each)


def shared_operands(slots: Sequence[jax.Array]) -> tuple[list[jax.Array], tuple[int, ...]]:
    """Slot arrays, those that are the same object once, and which of them each pool has."""
    arrays = list({id(array): array for array in slots}.values())
    return arrays, tuple(next(i for i, one in enumerate(arrays) if one is a) for a in slots)


def annotated(new: Int[Array, "_ *_"], old: Int[Array, "_ *_"]) -> Int[Array, "_ *_"]:
    """A kernel's result, said to be in the memory of the pool that it is in place of.

    Kernels' results are typed as device memory; saying where they are moves nothing.
    """
    return jax.device_put(new, jax.memory.Space.Host) if is_host(old) else new
