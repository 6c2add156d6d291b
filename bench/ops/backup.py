"""Backup: device slots to host records, in place."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops.copies import MEGABYTES_16, Copies, CopySizes, random_copies
from bench.pools import POOLS, Pools
from bench.roofline import Traffic
from bench.timing import Step
from bench.work import Memory, Work, WrongResultError, bind
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.backup import api
from pallas_kernels.common.backends import Backend
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.retrieve.api import retrieve

Lists = tuple[jax.Array, ...]
Operands = tuple[jax.Array, Lists, Lists]
BackupWork = Work[Pools, Operands, None]


@dataclasses.dataclass(frozen=True)
class Backup:
    """Random records of large pools written from slots.

    Attributes:
        sizes: sizes of the copies.
    """

    sizes: CopySizes

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, sizes=self.sizes.scaled())

    def memory(self) -> Memory:
        """See `work.Case`."""
        return self.sizes.memory()

    def build(self, backend: Backend) -> BackupWork:
        """See `work.Case`."""
        sizes, copies = self.sizes, random_copies(self.sizes)
        hosts = POOLS.take(sizes.pools, sizes.pool_records, sizes.words, original=False)
        slots = jax.random.bits(jax.random.key(0), (sizes.slots, sizes.words)).view(jnp.int32)
        moved = copies.live * sizes.record_bytes
        pointers = [host.unsafe_buffer_pointer() for host in hosts]
        return Work(
            step=_step(bind(api.backup, backend), sizes.pool_of),
            state=hosts,
            operands=(slots, copies.rows, copies.slots),
            calls=sizes.calls,
            traffic=Traffic(hbm_bytes=moved, link_bytes=moved),
            detail={"bytes": moved, "span_bytes": sizes.span},
            inspect=functools.partial(_check, sizes, pointers, slots, copies, backend),
        )


def _step(
    backup: Callable[..., jax.Array], pool_of: Callable[[int], int]
) -> Step[Pools, Operands, None]:
    def step(hosts: Pools, operands: Operands, call: int) -> tuple[Pools, None]:
        slots, rows, sources = operands
        turn = pool_of(call)
        host = backup(hosts[turn], slots, rows[call], sources[call])
        return (*hosts[:turn], host, *hosts[turn + 1 :]), None

    return step


def _check(
    sizes: CopySizes,
    pointers: list[int],
    slots: jax.Array,
    copies: Copies,
    backend: Backend,
    hosts: Pools,
    _: list[None],
) -> dict[str, Any]:
    """Read the records of the last call back, and hand the pools over."""
    rows, sources = copies.rows[-1], copies.slots[-1]
    places = jnp.arange(len(rows), dtype=jnp.int32)
    empty = jnp.zeros((len(rows), sizes.words), jnp.int32)
    read = jax.jit(functools.partial(retrieve, backend=backend), donate_argnums=1)
    written = read(hosts[sizes.pool_of(sizes.calls - 1)], empty, rows, places)
    if not bool(jnp.array_equal(written, slots[sources])):
        raise WrongResultError("backup left wrong records in the pool")
    in_place = [host.unsafe_buffer_pointer() for host in hosts] == pointers
    POOLS.give(hosts, original=False)
    return {"checked": True, "in_place": in_place}


def _cases() -> dict[str, Backup]:
    cases: dict[str, Backup] = {}
    for words in (164, 288, 672, 1152):
        size = words * WORD_BYTES
        # 512 records: 128 requests that accept 4 tokens each.
        few = CopySizes(words=words, records=512, calls=24)
        cases[f"{size}B_512"] = Backup(few)
        for name, total in (("4MB", MEGABYTES_16 // 4), ("16MB", MEGABYTES_16)):
            sizes = CopySizes(words=words, records=-(-total // size))
            cases[f"{size}B_{name}"] = Backup(sizes)
    return cases


CASES = _cases()


def shared(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], backend: Backend
) -> BackupWork:
    """A benchmark of the inputs of a shared case."""
    pool, slots, rows, sources = (jnp.array(array) for array in inputs)
    moved = int(((rows >= 0) & (sources >= 0)).sum()) * pool.shape[1] * WORD_BYTES
    return Work(
        step=_step(bind(api.backup, backend), lambda _: 0),
        state=(jax.device_put(pool, host_sharding()),),
        operands=(slots, (rows,), (sources,)),
        calls=1,
        traffic=Traffic(hbm_bytes=moved, link_bytes=moved),
        detail={"bytes": moved},
    )
