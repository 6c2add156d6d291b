"""Backup: device slots to host records, in place."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from bench.ops.copies import MEGABYTES_16, CopySizes, random_copies
from bench.pools import POOLS, Pools
from bench.roofline import Traffic
from bench.work import Memory, Work, WrongResultError, bind
from dhisparse_jax.engine.timing import Step
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.backup import api, cases
from pallas_kernels.common.backends import Backend
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches

Call = Callable[..., Pools]
Operands = tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]
BackupWork = Work[Pools, Operands, None]


@dataclasses.dataclass(frozen=True)
class Backup:
    """Random records of large pools written from slots: the same rows of all pools in one call.

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
        rows = tuple(rows.reshape(-1) for rows in copies.rows)
        # Each pool from slots of its own, as far as there are some.
        turn = sizes.records * jnp.arange(sizes.written, dtype=jnp.int32)[:, None]
        sources = tuple((slots.reshape(1, -1) + turn) % sizes.slots for slots in copies.slots)
        moved = copies.live * sizes.record_bytes * sizes.written
        pointers = [host.unsafe_buffer_pointer() for host in hosts]
        return Work(
            step=step_of(sizes)(bind(api.backup, backend)),
            state=hosts,
            operands=(slots, rows, sources),
            calls=sizes.calls,
            traffic=Traffic(hbm_bytes=moved, link_bytes=moved),
            detail={"bytes": moved, "pools": sizes.written, "span_bytes": sizes.reached},
            inspect=functools.partial(_check, sizes, pointers, (slots, rows, sources)),
        )


def step_of(sizes: CopySizes) -> Callable[[Call], Step[Pools, Operands, None]]:
    """Turns the operation, or a variant of it, into a step of a chain."""

    def make(backup: Call) -> Step[Pools, Operands, None]:
        def step(hosts: Pools, operands: Operands, call: int) -> tuple[Pools, None]:
            slots, rows, sources = operands
            count = sizes.written
            written = backup(hosts[:count], [slots] * count, rows[call], sources[call])
            return (*written, *hosts[count:]), None

        return step

    return make


def _check(
    sizes: CopySizes,
    pointers: list[int],
    operands: Operands,
    hosts: Pools,
    _: list[None],
) -> dict[str, Any]:
    """Read the records of the last call back, and hand the pools over."""
    slots, rows, sources = operands
    places = jnp.arange(sizes.records, dtype=jnp.int32)[None]
    fetches = Fetches(rows[-1][None], places, jnp.full(1, sizes.records, jnp.int32))
    read = jax.jit(retrieve)
    empty = jnp.zeros((sizes.records, sizes.words), jnp.int32)
    for host, written in zip(hosts[: sizes.written], sources[-1], strict=True):
        if not bool(jnp.array_equal(read(host, empty, fetches), slots[written])):
            raise WrongResultError("backup left wrong records in a pool")
    in_place = [host.unsafe_buffer_pointer() for host in hosts] == pointers
    POOLS.give(hosts, original=False)
    return {"checked": True, "in_place": in_place}


def _cases() -> dict[str, Backup]:
    sized: dict[str, Backup] = {}
    for words in (164, 192, 288, 672, 1152):
        size = words * WORD_BYTES
        for records in (8, 64, 512):  # 512: 128 requests that accept 4 tokens each
            sized[f"{size}B_{records}"] = Backup(CopySizes(words=words, records=records, calls=24))
        for name, total in (("4MB", MEGABYTES_16 // 4), ("16MB", MEGABYTES_16)):
            sizes = CopySizes(words=words, records=1)
            records = -(-total // (size * sizes.pools))
            sized[f"{size}B_{name}"] = Backup(dataclasses.replace(sizes, records=records))
    return sized


CASES = _cases()


def shared(inputs: cases.Inputs, backend: Backend) -> BackupWork:
    """A benchmark of the inputs of a shared case."""
    hosts, slots, rows, sources = jax.tree.map(jnp.array, inputs[:4])
    operation = bind(api.backup, backend)
    live = (rows >= 0)[None] & (sources >= 0)
    records = live.sum(axis=1) * jnp.asarray([host.shape[1] for host in hosts])
    moved = int(records.sum()) * WORD_BYTES

    def step(hosts: Pools, operands: Operands, _: int) -> tuple[Pools, None]:
        every, (rows,), (sources,) = operands
        return operation(hosts, [every[one] for one in inputs.slots_of], rows, sources), None

    return Work(
        step=step,
        state=tuple(jax.device_put(host, host_sharding()) for host in hosts),
        operands=(slots, (rows,), (sources,)),
        calls=1,
        traffic=Traffic(hbm_bytes=moved, link_bytes=moved),
        detail={"bytes": moved},
    )
