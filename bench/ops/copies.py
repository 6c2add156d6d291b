"""Lists of records to copy between host pools and device slots, for `retrieve` and `backup`."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bench.caches import lru, simulate
from bench.traces import trace
from bench.work import Memory
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.rows import WORD_BYTES

POOL_BYTES = 4 << 30
"""About the pool of a GLM-5.3 selection group: 16 requests, 100,000 positions, 2,688 B records."""

MEGABYTES_16 = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySizes:
    """Sizes of a case that copies records.

    Attributes:
        words: int32 words of a record.
        records: records per call.
        pools: host pools.
        used: how many of them the calls go round; 0 is all. The others only keep the memory, so
            that spans can be compared without pinning it again.
        pool_bytes: size of each.
        reach: bytes at the start of a pool that the records come from; 0 is all of it.
        calls: calls of a chain.
    """

    words: int
    records: int
    pools: int = 6
    used: int = 0
    pool_bytes: int = POOL_BYTES
    reach: int = 0
    calls: int = 6

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.words * WORD_BYTES

    @property
    def pool_records(self) -> int:
        """Records of a pool."""
        return self.pool_bytes // self.record_bytes

    @property
    def slots(self) -> int:
        """Device slots: four times what a call copies."""
        return 4 * self.records

    @property
    def span(self) -> int:
        """Bytes that the records of a chain are spread over."""
        return (self.reach or self.pool_bytes) * min(self.used or self.pools, self.calls)

    def pool_of(self, call: int) -> int:
        """Which pool a call copies from or to."""
        return call % (self.used or self.pools)

    def scaled(self) -> "CopySizes":
        """The same case with pools of some MB."""
        least = 8 * self.record_bytes * min(self.records, 64)
        return dataclasses.replace(
            self,
            records=min(self.records, 64),
            pools=min(self.pools, 2),
            used=min(self.used, 2),
            pool_bytes=max(least, 1 << 20),
            reach=min(self.reach, 1 << 19),
            calls=2,
        )

    def memory(self) -> Memory:
        """Pools on the host; slots, and a pool while it is filled, on the device."""
        filling = 3 * self.pool_bytes
        return Memory(self.pools * self.pool_bytes, filling + self.slots * self.record_bytes)


class Copies(NamedTuple):
    """Lists of records, a list per call. `live` is how many entries a call copies on average."""

    rows: tuple[Int[Array, " n"], ...]
    slots: tuple[Int[Array, " n"], ...]
    live: float


def random_copies(sizes: CopySizes) -> Copies:
    """Distinct random records of a pool, in distinct random slots."""
    rng = np.random.default_rng(0)
    within = (sizes.reach or sizes.pool_bytes) // sizes.record_bytes
    draw = lambda size: tuple(
        jnp.asarray(rng.choice(size, sizes.records, replace=False), jnp.int32)
        for _ in range(sizes.calls)
    )
    return Copies(draw(within), draw(sizes.slots), sizes.records)


def missed_copies(sizes: CopySizes, *, requests: int, k: int, budget: int) -> Copies:
    """What requests that follow calibrated traces fetch, as the library passes it on.

    A call has an entry for every selected position, NO_SLOT where it is resident: K entries per
    request, most of which copy nothing.
    """
    rng = np.random.default_rng(0)
    capacity = sizes.pool_records // requests
    history = capacity - sizes.calls
    rows = np.full((sizes.calls, requests, k), NO_SLOT)
    for request in range(requests):
        sample = trace(k=k, history=history, steps=sizes.calls, seed=request)
        steps = [np.sort(selected) for selected in sample.selection]
        missed = simulate(steps, lru, sample.stack[:budget], history)
        for row, selected, fetched in zip(rows, steps, missed, strict=True):
            row[request] = np.where(np.isin(selected, fetched), request * capacity + selected, -1)
    rows = rows.reshape(sizes.calls, -1)
    slots = np.stack([rng.permutation(sizes.slots)[: rows.shape[1]] for _ in rows])
    slots = np.where(rows >= 0, slots, NO_SLOT)
    lists = lambda arrays: tuple(jnp.asarray(array, jnp.int32) for array in arrays)
    return Copies(lists(rows), lists(slots), float((rows >= 0).sum() / sizes.calls))
