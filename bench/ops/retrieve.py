"""Retrieval: host records to device slots."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops.copies import MEGABYTES_16, Copies, CopySizes, missed_copies, random_copies
from bench.pools import POOLS, Pools, record_words
from bench.roofline import Traffic
from bench.work import Memory, Work, WrongResultError, bind
from dhisparse_jax.engine.timing import Step
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.common.backends import Backend
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.retrieve import api, cases
from pallas_kernels.retrieve.types import Fetches, wanted_targets

Call = Callable[..., jax.Array]
Operands = tuple[Pools, tuple[Fetches, ...]]
RetrieveWork = Work[jax.Array, Operands, None]


@dataclasses.dataclass(frozen=True)
class Misses:
    """Requests that follow calibrated traces with an LRU cache.

    Attributes:
        k: K.
        budget: slots per request, in units of K.
    """

    k: int = 2048
    budget: int = 2


@dataclasses.dataclass(frozen=True)
class Retrieve:
    """Records of large pools.

    Attributes:
        sizes: sizes of the copies.
        misses: who fetches; random records without.
    """

    sizes: CopySizes
    misses: Misses | None = None

    def small(self) -> Self:
        """See `work.Case`."""
        sizes, misses = self.sizes.scaled(), self.misses
        if misses is not None:
            sizes = dataclasses.replace(sizes, records=128, pool_bytes=4 << 20)
            misses = dataclasses.replace(misses, k=64)
        return dataclasses.replace(self, sizes=sizes, misses=misses)

    def memory(self) -> Memory:
        """See `work.Case`."""
        return self.sizes.memory()

    def copies(self) -> Copies:
        """The lists of records."""
        if (who := self.misses) is None:
            return random_copies(self.sizes)
        return missed_copies(self.sizes, k=who.k, budget=who.budget * who.k)

    def build(self, backend: Backend) -> RetrieveWork:
        """See `work.Case`."""
        sizes, copies = self.sizes, self.copies()
        hosts = POOLS.take(sizes.pools, sizes.pool_records, sizes.words)
        moved = copies.live * sizes.record_bytes
        detail = {"bytes": moved, "span_bytes": sizes.span, "entries": copies.rows[0].size}
        return Work(
            step=step_of(sizes)(bind(api.retrieve, backend)),
            state=jnp.zeros((sizes.slots, sizes.words), jnp.int32),
            operands=(hosts, tuple(map(Fetches, copies.rows, copies.slots, copies.counts))),
            calls=sizes.calls,
            traffic=Traffic(hbm_bytes=moved, link_bytes=moved),
            detail=detail,
            inspect=functools.partial(_check, sizes, hosts, copies),
        )


def step_of(sizes: CopySizes) -> Callable[[Call], Step[jax.Array, Operands, None]]:
    """Turns the operation, or a variant of it, into a step of a chain."""

    def make(retrieve: Call) -> Step[jax.Array, Operands, None]:
        def step(slots: jax.Array, operands: Operands, call: int) -> tuple[jax.Array, None]:
            hosts, fetches = operands
            return retrieve(hosts[sizes.pool_of(call)], slots, fetches[call]), None

        return step

    return make


def _check(
    sizes: CopySizes, hosts: Pools, copies: Copies, slots: jax.Array, _: list[None]
) -> dict[str, Any]:
    """Compare the records of the last call with what they must be, and hand the pools back."""
    live = np.nonzero(np.asarray(copies.rows[-1]) >= 0)
    wanted = record_words(copies.rows[-1][live], sizes.words, sizes.pool_of(sizes.calls - 1))
    if not bool(jnp.array_equal(slots[copies.slots[-1][live]], wanted)):
        raise WrongResultError("retrieve left wrong records in the slots")
    POOLS.give(hosts)
    return {"checked": True}


def _random(words: int, records: int, calls: int = 6, **sizes: int) -> Retrieve:
    return Retrieve(CopySizes(words=words, records=records, calls=calls, **sizes))


def _cases() -> dict[str, Retrieve]:
    sized: dict[str, Retrieve] = {}
    # One pool of more than 2**31 words: offsets need 64 bits, and a single call spans all of it.
    # First, because the memory that it leaves behind holds the smaller pools, and not the reverse.
    for words in (164, 672):
        size = words * WORD_BYTES
        records = -(-MEGABYTES_16 // size)
        sized[f"{size}B_16MB_one_pool"] = _random(words, records, pools=1, pool_bytes=24 << 30)
    for words in (164, 192, 288, 672, 1152):
        size = words * WORD_BYTES
        for records in (8, 64, 512):
            sized[f"{size}B_{records}"] = _random(words, records, calls=24)
        for name, total in (("16MB", MEGABYTES_16), ("48MB", 3 * MEGABYTES_16)):
            sized[f"{size}B_{name}"] = _random(words, -(-total // size))
        if words == 672:
            sizes = CopySizes(words=words, records=16 * 2048, requests=16)
            for budget in (2, 4):
                sized[f"{size}B_misses_{budget}K"] = Retrieve(sizes, Misses(budget=budget))
            # Few records in lists with room for all that 8 queries of 128 requests can select.
            sized[f"{size}B_512_of_2M"] = _random(
                words, 512, calls=24, requests=128, entries=8 * 2048
            )
    return sized


CASES = _cases()


def shared(inputs: cases.Inputs, backend: Backend) -> RetrieveWork:
    """A benchmark of the inputs of a shared case."""
    pool, slots, fetches, moves = jax.tree.map(jnp.array, inputs)
    moved = int((wanted_targets(fetches) >= 0).sum()) * pool.shape[1] * WORD_BYTES
    operation = functools.partial(bind(api.retrieve, backend), moves=moves)
    return Work(
        step=step_of(CopySizes(words=pool.shape[1], records=1, pools=1))(operation),
        state=slots,
        operands=((jax.device_put(pool, host_sharding()),), (fetches,)),
        calls=1,
        traffic=Traffic(hbm_bytes=moved, link_bytes=moved),
        detail={"bytes": moved},
    )
