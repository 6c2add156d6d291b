"""Retrieval and attention in one launch, beside each of them alone."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bench.ops import sparse_attention
from bench.ops.copies import CopySizes, Selections, random_selections, traced_selections
from bench.ops.sparse_attention import Attended, SparseAttention
from bench.pools import POOLS, Pools, record_words
from bench.roofline import Traffic
from bench.traces import GLM_5_1
from bench.trials import equal
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.common.backends import Backend, default_backend
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.common.scaled_rows import GLM_FP8
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches
from pallas_kernels.retrieve_attend import api
from pallas_kernels.retrieve_attend.api import Attention
from pallas_kernels.retrieve_attend.cases import Inputs
from pallas_kernels.sparse_attention.api import sparse_attention as attend


class Operands(NamedTuple):
    """What the calls of a chain read.

    Attributes:
        hosts: host pools.
        fetches: what each call fetches.
        attentions: what each call attends with.
    """

    hosts: Pools
    fetches: tuple[Fetches, ...]
    attentions: tuple[Attention, ...]


FusedWork = Work[jax.Array, Operands, Attended]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieveAttend:
    """One query per request of GLM-5.x, whose rows are partly in large host pools.

    Attributes:
        sizes: sizes of the copies, with as many records as are selected.
        attention: sizes of the attention.
        share: how much of the selection is missing.
        traced: whether selections follow calibrated traces, with an LRU cache of the budget that
            misses this share; without, they are random, and so is what they miss.
    """

    sizes: CopySizes
    attention: SparseAttention
    share: float
    traced: bool

    def small(self) -> Self:
        """See `work.Case`."""
        attention = self.attention.small()
        selected = attention.requests * attention.k
        sizes = dataclasses.replace(self.sizes.scaled(), records=selected, pool_bytes=4 << 20)
        return dataclasses.replace(self, sizes=sizes, attention=attention)

    def memory(self) -> Memory:
        """See `work.Case`."""
        return self.sizes.memory()

    @property
    def budget(self) -> int:
        """Slots of a request in the LRU cache of the traces."""
        return GLM_5_1.budget(self.share, self.attention.k, self.sizes.capacity)

    def selections(self) -> Selections:
        """What every call selects and misses."""
        if self.traced:
            return traced_selections(self.sizes, k=self.attention.k, budget=self.budget)
        return random_selections(self.sizes, k=self.attention.k, share=self.share)

    def build(self, backend: Backend) -> FusedWork:
        """See `work.Case`."""
        sizes, attention, rng = self.sizes, self.attention, np.random.default_rng(0)
        lists = [_lists(rng, sizes, *call) for call in zip(*self.selections(), strict=True)]
        shape = (sizes.requests, 1, attention.heads, attention.width)
        keys = jax.random.split(jax.random.key(0), sizes.calls)
        queries = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        hosts = POOLS.take(sizes.pools, sizes.pool_records, sizes.words)
        operands = Operands(
            hosts,
            tuple(fetches for fetches, *_ in lists),
            tuple(Attention(query, *ids) for query, (_, *ids) in zip(queries, lists, strict=True)),
        )
        fused, parts = _steps(backend, attention.options, sizes.pool_of)
        live = sum(int(fetches.counts.sum()) for fetches in operands.fetches) / sizes.calls
        fill = jax.jit(record_words, static_argnums=1)
        return Work(
            step=fused,
            state=fill(jnp.arange(sizes.slots, dtype=jnp.int32), sizes.words, sizes.pools),
            operands=operands,
            calls=sizes.calls,
            traffic=_traffic(attention.traffic(), live, sizes.record_bytes, attention.row_bytes),
            detail={
                "missed": live / (sizes.requests * attention.k),
                "bytes": live * sizes.record_bytes,
                "span_bytes": sizes.span,
                **({"budget_k": self.budget / attention.k} if self.traced else {}),
            },
            inspect=partial(_check, sizes, operands, parts["attend"]),
            parts=parts,
        )


def _lists(
    rng: np.random.Generator,
    sizes: CopySizes,
    positions: Int[np.ndarray, "R K"],
    missed: Bool[np.ndarray, "R K"],
) -> tuple[Fetches, Int[Array, "R 1 K"], Int[Array, "R 1 K"], Int[Array, "R K"]]:
    """Fetches, locations, selection and missing positions of a call, in slots of each request.

    What is missing goes to its first slots in every call, so that it always replaces another
    record: attention that reads too early is noticed.
    """
    location, k, each = np.empty_like(positions), positions.shape[1], sizes.slots // len(missed)
    for request, which in enumerate(missed):
        first, count = each * request, which.sum()
        location[request, which] = first + rng.permutation(count)
        location[request, ~which] = first + count + rng.permutation(each - count)[: k - count]
    order, counts = np.argsort(~missed, axis=1, kind="stable"), missed.sum(axis=1)
    counted = np.arange(k) < counts[:, None]
    front = lambda ids: np.where(counted, np.take_along_axis(ids, order, axis=1), NO_SLOT)
    as_ids = lambda array: jnp.asarray(array, jnp.int32)
    first = sizes.capacity * np.arange(len(positions))[:, None]
    fetches = Fetches(*map(as_ids, (front(first + positions), front(location), counts)))
    missing = as_ids(front(positions))
    return fetches, as_ids(location[:, None]), as_ids(positions[:, None]), missing


FusedStep = Step[jax.Array, Operands, Attended]


def _steps(
    backend: Backend, options: Mapping[str, Any], pool_of: Callable[[int], int]
) -> tuple[FusedStep, dict[str, Step[jax.Array, Operands, Any]]]:
    """The operation as a step of a chain, and what it consists of, each with its own kernel."""
    own = lambda name: backend if backend == "reference" else default_backend(name)
    fused = partial(bind(api.retrieve_attend, backend), **options)
    fetch = bind(retrieve, own("retrieve"))
    read = partial(bind(attend, own("sparse_attention")), **options)

    def both(slots: jax.Array, operands: Operands, call: int) -> tuple[jax.Array, Attended]:
        hosts, fetches, attentions = operands
        attended, slots = fused(hosts[pool_of(call)], slots, fetches[call], attentions[call])
        return slots, attended

    def retrieve_only(slots: jax.Array, operands: Operands, call: int) -> tuple[jax.Array, None]:
        return fetch(operands.hosts[pool_of(call)], slots, operands.fetches[call]), None

    def attend_only(slots: jax.Array, operands: Operands, call: int) -> tuple[jax.Array, Attended]:
        query, location, _, _ = operands.attentions[call]
        return slots, read(query, slots, location)

    return both, {"retrieve": retrieve_only, "attend": attend_only}


def _traffic(attention: Traffic, live: float, record_bytes: int, row_bytes: int) -> Traffic:
    """Missing records cross the link and are written; only the other rows are read."""
    return Traffic(
        hbm_bytes=attention.hbm_bytes + live * (record_bytes - row_bytes),
        link_bytes=live * record_bytes,
        flops=attention.flops,
    )


def _check(
    sizes: CopySizes,
    operands: Operands,
    attend_only: FusedStep,
    slots: jax.Array,
    results: list[Attended],
) -> dict[str, Any]:
    """Compare the last call with its records and with plain attention, and hand the pools back."""
    last = sizes.calls - 1
    rows, targets, _ = operands.fetches[last]
    live = np.nonzero(np.asarray(rows) >= 0)
    wanted = record_words(rows[live], sizes.words, sizes.pool_of(last))
    equal({"records": slots[targets[live]]}, {"records": wanted})
    again = jax.jit(lambda slots, operands: attend_only(slots, operands, last)[1])
    attended = again(slots, operands)
    names = "values", "lse"
    equal(dict(zip(names, results[last], strict=True)), dict(zip(names, attended, strict=True)))
    POOLS.give(operands.hosts)
    return {"checked": True}


SHARES = {"14.2": 0.142, "1.4": 0.014}
"""Misses of a cache that holds little more than the working set, and of one that holds most."""


def _cases() -> dict[str, RetrieveAttend]:
    """Rows of one layer, of a group of four layers, and of such a group in fp8."""
    attention = SparseAttention()
    fp8 = dataclasses.replace(attention, scaled=GLM_FP8)
    cases: dict[str, RetrieveAttend] = {}
    for words, reads in ((288, attention), (1152, attention), (672, fp8)):
        sizes = CopySizes(
            words=words,
            records=reads.requests * reads.k,
            requests=reads.requests,
            pools=2,
            pool_bytes=12 << 30,
        )
        for kind in ("traces", "random"):
            for name, share in SHARES.items():
                cases[f"{sizes.record_bytes}B_{kind}_{name}"] = RetrieveAttend(
                    sizes=sizes, attention=reads, share=share, traced=kind == "traces"
                )
    return cases


CASES = _cases()


def shared(inputs: Inputs, backend: Backend) -> FusedWork:
    """A benchmark of the inputs of a shared case.

    Raises:
        NotImplementedError: if the case moves slots too.
    """
    if inputs.moves is not None:
        raise NotImplementedError("moves are a launch of their own, timed as retrieve")
    alone = sparse_attention.shared(inputs.after, default_backend("sparse_attention"))
    after = inputs.after
    names = ("offset", "row_format", "value_width", "scale")
    fused, parts = _steps(backend, {name: getattr(after, name) for name in names}, lambda _: 0)
    given = after.query, after.location, inputs.selection, inputs.missing
    attention = Attention(*map(jnp.array, given))
    host = jax.device_put(jnp.array(inputs.host), host_sharding())
    live, record_bytes = int(inputs.fetches.counts.sum()), inputs.slots.shape[1] * WORD_BYTES
    row_bytes = sparse_attention.row_bytes_of(after)
    return Work(
        step=fused,
        state=jnp.array(inputs.slots),
        operands=Operands((host,), (inputs.fetches,), (attention,)),
        calls=1,
        traffic=_traffic(alone.traffic, live, record_bytes, row_bytes),
        detail={"bytes": live * record_bytes},
        parts=parts,
    )
