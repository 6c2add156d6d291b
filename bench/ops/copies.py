"""Lists of records to copy between host pools and device slots, for `retrieve` and `backup`."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

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
        records: records per call, and in each pool that it writes to.
        requests: lists that they are spread over.
        entries: room in each list; 0 is as much as it needs.
        pools: host pools.
        used: how many of them the calls use; 0 is all. The others only keep the memory, so that
            spans can be compared without pinning it again.
        pool_bytes: size of each.
        reach: bytes at the start of a pool that the records come from; 0 is all of it.
        calls: calls of a chain.
    """

    words: int
    records: int
    requests: int = 1
    entries: int = 0
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
        """Records of a pool, as many for each request."""
        return self.pool_bytes // self.record_bytes // self.requests * self.requests

    @property
    def slots(self) -> int:
        """Device slots: four times what a call copies from a pool."""
        return 4 * self.records

    @property
    def capacity(self) -> int:
        """Records of a request in a pool."""
        return self.pool_records // self.requests

    @property
    def span(self) -> int:
        """Bytes that the records of a chain are spread over."""
        return (self.reach or self.pool_bytes) * min(self.written, self.calls)

    @property
    def written(self) -> int:
        """How many pools a call writes, where it writes all of those in use."""
        return self.used or self.pools

    @property
    def reached(self) -> int:
        """Bytes that the records of such a call are spread over."""
        return (self.reach or self.pool_bytes) * self.written

    def pool_of(self, call: int) -> int:
        """Which pool a call reads, where it reads one."""
        return call % self.written

    def scaled(self) -> "CopySizes":
        """The same case with pools of some MB."""
        least = 8 * self.record_bytes * min(self.records, 64)
        return dataclasses.replace(
            self,
            records=min(self.records, 64),
            requests=min(self.requests, 2),
            entries=min(self.entries, 64),
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
    """Lists of records by request, a list per call.

    Attributes:
        rows: record of the pool, NO_SLOT after those that count.
        slots: slot of each.
        counts: how many count.
        live: how many entries a call copies on average.
    """

    rows: tuple[Int[Array, "R n"], ...]
    slots: tuple[Int[Array, "R n"], ...]
    counts: tuple[Int[Array, " R"], ...]
    live: float


def random_copies(sizes: CopySizes) -> Copies:
    """Distinct random records of a pool, in distinct random slots; as many for each request."""
    rng = np.random.default_rng(0)
    within = (sizes.reach or sizes.pool_bytes) // sizes.record_bytes // sizes.requests
    each = sizes.records // sizes.requests
    calls = [
        [rng.choice(within, each, replace=False) for _ in range(sizes.requests)]
        for _ in range(sizes.calls)
    ]
    return _listed(sizes, rng, calls)


def missed_copies(sizes: CopySizes, *, k: int, budget: int) -> Copies:
    """What requests that follow calibrated traces fetch, as the plan lists it.

    There is room for every selected position, K entries per request, most of which do not count.
    """
    rng = np.random.default_rng(0)
    selected = zip(*traced_selections(sizes, k=k, budget=budget), strict=True)
    calls = [
        [mine[which] for mine, which in zip(positions, missed, strict=True)]
        for positions, missed in selected
    ]
    return _listed(dataclasses.replace(sizes, entries=k), rng, calls)


class Selections(NamedTuple):
    """What requests select in each call.

    Attributes:
        positions: distinct positions of each request, ascending.
        missed: which of them have to be fetched.
    """

    positions: Int[np.ndarray, "calls R K"]
    missed: Bool[np.ndarray, "calls R K"]


def traced_selections(sizes: CopySizes, *, k: int, budget: int) -> Selections:
    """Requests that follow calibrated traces with an LRU cache of `budget` slots."""
    history = sizes.capacity - sizes.calls
    shape = (sizes.calls, sizes.requests, k)
    positions, missed = np.empty(shape, np.int32), np.empty(shape, np.bool_)
    for request in range(sizes.requests):
        sample = trace(k=k, history=history, steps=sizes.calls, seed=request)
        steps = positions[:, request] = np.sort(sample.selection, axis=1)
        fetched = simulate(list(steps), lru, sample.stack[:budget], history)
        for call, each in enumerate(fetched):
            missed[call, request] = np.isin(steps[call], each)
    return Selections(positions, missed)


def random_selections(sizes: CopySizes, *, k: int, share: float) -> Selections:
    """Random positions, of which every request misses the same share, wherever they are."""
    rng = np.random.default_rng(0)
    shape = (sizes.calls, sizes.requests)
    drawn = [rng.choice(sizes.capacity, k, replace=False) for _ in range(sizes.calls * shape[1])]
    missed = rng.permuted(np.tile(np.arange(k) < round(share * k), (*shape, 1)), axis=2)
    return Selections(np.sort(drawn, axis=1).reshape(*shape, k).astype(np.int32), missed)


def _listed(sizes: CopySizes, rng: np.random.Generator, calls: list[list[np.ndarray]]) -> Copies:
    """The records of each call and request, at the front of its list; slots are distinct."""
    entries = sizes.entries or sizes.records // sizes.requests
    rows = np.full((sizes.calls, sizes.requests, entries), NO_SLOT)
    slots = np.full_like(rows, NO_SLOT)
    counts = np.array([[len(records) for records in call] for call in calls])
    for number, call in enumerate(calls):
        free = np.split(
            rng.permutation(sizes.slots)[: counts[number].sum()], counts[number].cumsum()
        )
        for request, records in enumerate(call):
            rows[number, request, : len(records)] = request * sizes.capacity + records
            slots[number, request, : len(records)] = free[request]
    lists = lambda arrays: tuple(jnp.asarray(array, jnp.int32) for array in arrays)
    return Copies(lists(rows), lists(slots), lists(counts), float(counts.sum() / sizes.calls))
