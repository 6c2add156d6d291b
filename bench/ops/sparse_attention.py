"""Sparse attention over resident rows."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bench.roofline import Traffic
from bench.timing import Step
from bench.work import Memory, Work, bind
from pallas_kernels.common.backends import Backend
from pallas_kernels.common.rows import pack
from pallas_kernels.sparse_attention import api

Operands = tuple[list[Array], Array, list[Array]]
"""Queries of every call, slots, locations of every call."""

Attended = tuple[Array, Array]
"""Values and log-sum-exp."""

AttentionWork = Work[tuple[()], Operands, Attended]

SharedInputs = tuple[np.ndarray, np.ndarray, np.ndarray, int, str, int, float, np.ndarray]
"""Fields of `pallas_kernels.sparse_attention.cases.Inputs`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Absorbed MLA of GLM-5.x; every selected row is in a slot.

    Attributes:
        requests: R.
        queries: T.
        heads: H.
        k: K.
        overlap: share of a query's rows that the query before it selects too.
        rows: format of the rows: "bf16" (576 numbers), "fp8" (656 B with inline scales), or "v4"
            (584 B entries).
        calls: calls of a chain, each with queries and selections of its own.
    """

    requests: int = 128
    queries: int = 1
    heads: int = 64
    k: int = 2048
    overlap: float = 0.3
    rows: str = "bf16"
    calls: int = 2

    width = 576
    value_width = 512
    scale = 256**-0.5

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the operation that are no arrays."""
        return {
            "offset": 0,
            "row_dtype": jnp.bfloat16,
            "value_width": self.value_width,
            "scale": self.scale,
        }

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, requests=2, heads=8, k=64)

    @property
    def distinct(self) -> int:
        """Rows that the queries of a request select together."""
        return self.k + (self.queries - 1) * (self.k - self._shared)

    @property
    def _shared(self) -> int:
        return round(self.overlap * self.k) if self.queries > 1 else 0

    @property
    def slots(self) -> int:
        """Slots of a request: also rows that nobody selects."""
        return max(2 * self.k, self.distinct)

    def memory(self) -> Memory:
        """See `work.Case`. Plain jnp keeps the gathered rows and the logits."""
        slots = self.requests * self.slots * self.width * 2
        gathered = self.requests * self.queries * self.k * (2 * self.width * 2 + 3 * self.heads * 4)
        return Memory(0, 4 * slots + gathered)

    def build(self, backend: Backend) -> AttentionWork:
        """See `work.Case`."""
        if self.rows != "bf16":
            raise NotImplementedError(f"sparse_attention takes no {self.rows} rows")
        rng = np.random.default_rng(0)
        count = self.requests * self.slots
        slots = _random_rows(jax.random.key(0), count, self.width)
        shape = (self.requests, self.queries, self.heads, self.width)
        keys = jax.random.split(jax.random.key(1), self.calls)
        queries = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        locations = [jnp.asarray(self._locations(rng), jnp.int32) for _ in keys]
        return Work(
            step=step(partial(bind(api.sparse_attention, backend), **self.options)),
            state=(),
            operands=(queries, slots, locations),
            calls=self.calls,
            traffic=self._traffic(),
            detail={"distinct_rows": self.distinct},
        )

    def _locations(self, rng: np.random.Generator) -> Int[np.ndarray, "R T K"]:
        """Slots of each query: some of those that are new in the query before, the rest new."""
        shared, fresh = self._shared, self.k - self._shared
        locations = np.empty((self.requests, self.queries, self.k), np.int64)
        for request in range(self.requests):
            mine = request * self.slots + rng.permutation(self.slots)
            locations[request, 0] = mine[: self.k]
            for query in range(1, self.queries):
                end = self.k + query * fresh
                locations[request, query] = rng.permutation(mine[end - fresh - shared : end])
        return locations

    def _traffic(self) -> Traffic:
        """Every distinct row once, queries, values and locations once."""
        pairs = self.requests * self.queries * self.heads
        rows = self.requests * self.distinct * self.width * 2
        each = pairs * (self.width + self.value_width) * 2
        return Traffic(
            hbm_bytes=rows + each + 4 * self.requests * self.queries * self.k,
            flops=2 * pairs * self.k * (self.width + self.value_width),
        )


@partial(jax.jit, static_argnums=(1, 2))
def _random_rows(key: Array, count: int, width: int) -> Int[Array, "S W"]:
    """Normal bfloat16 rows as records."""
    return pack(jax.random.normal(key, (count, width), jnp.bfloat16))


def step(attend: Callable[..., Attended]) -> Step[tuple[()], Operands, Attended]:
    """Each call has queries and a selection of its own."""

    def one(state: tuple[()], operands: Operands, call: int) -> tuple[tuple[()], Attended]:
        queries, slots, locations = operands
        return state, attend(queries[call], slots, locations[call])

    return one


CASES: dict[str, SparseAttention] = {
    "128_requests_T1": SparseAttention(),
    "128_requests_T8": SparseAttention(queries=8),
    "128_requests_T1_fp8": SparseAttention(rows="fp8"),
    "128_requests_T8_fp8": SparseAttention(queries=8, rows="fp8"),
    "128_requests_T1_v4": SparseAttention(rows="v4"),
    "128_requests_T8_v4": SparseAttention(queries=8, rows="v4"),
}


def shared(inputs: SharedInputs, backend: Backend) -> AttentionWork:
    """A benchmark of the inputs of a shared case."""
    query, slots, location, offset, row_dtype, value_width, scale, _ = inputs
    attend = partial(
        bind(api.sparse_attention, backend),
        offset=offset,
        row_dtype=jnp.dtype(row_dtype),
        value_width=value_width,
        scale=scale,
    )
    width = query.shape[-1]
    rows = len(np.unique(location[location >= 0]))
    pairs, selected = query.size // width, location.shape[-1]
    return Work(
        step=step(attend),
        state=(),
        operands=([jnp.asarray(query)], jnp.asarray(slots), [jnp.asarray(location)]),
        calls=1,
        traffic=Traffic(
            hbm_bytes=(rows + 2 * pairs) * width * query.dtype.itemsize,
            flops=2 * pairs * selected * (width + value_width),
        ),
    )
