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
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from pallas_kernels.common.backends import Backend
from pallas_kernels.common.rows import WORD_BYTES, pack
from pallas_kernels.common.scaled_rows import GLM_FP8, V4_ENTRY, ScaledRow, encode
from pallas_kernels.sparse_attention import api
from pallas_kernels.sparse_attention.cases import Inputs

Operands = tuple[list[Array], Array, list[Array]]
"""Queries of every call, slots, locations of every call."""

Attended = tuple[Array, Array]
"""Values and log-sum-exp."""

AttentionWork = Work[tuple[()], Operands, Attended]

ROW_BYTES = 128
"""Records are whole multiples of this, as in a hierarchy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Absorbed MLA of GLM-5.x, or attention over entries of DeepSeek-V4; every row is in a slot.

    Attributes:
        requests: R.
        queries: T.
        heads: H.
        k: K.
        overlap: share of a query's rows that the query before it selects too.
        scaled: format of the rows, if they are not 576 numbers of bfloat16.
        calls: calls of a chain, each with queries and selections of its own.
    """

    requests: int = 128
    queries: int = 1
    heads: int = 64
    k: int = 2048
    overlap: float = 0.3
    scaled: ScaledRow | None = None
    calls: int = 2

    value_width = 512
    scale = 256**-0.5

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.scaled.width if self.scaled else 576

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.scaled.bytes if self.scaled else 2 * self.width

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the operation that are no arrays."""
        return {
            "offset": 0,
            "row_format": self.scaled or jnp.bfloat16,
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
        slots = self.requests * self.slots * self.width * 2  # before they are scaled
        gathered = self.requests * self.queries * self.k * (2 * self.width * 2 + 3 * self.heads * 4)
        return Memory(0, 4 * slots + gathered)

    def build(self, backend: Backend) -> AttentionWork:
        """See `work.Case`."""
        rng = np.random.default_rng(0)
        count = self.requests * self.slots
        slots = _random_rows(jax.random.key(0), count, self.width, self.scaled)
        shape = (self.requests, self.queries, self.heads, self.width)
        keys = jax.random.split(jax.random.key(1), self.calls)
        queries = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        locations = [jnp.asarray(self._locations(rng), jnp.int32) for _ in keys]
        return Work(
            step=step(partial(bind(api.sparse_attention, backend), **self.options)),
            state=(),
            operands=(queries, slots, locations),
            calls=self.calls,
            traffic=self.traffic(),
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

    def traffic(self) -> Traffic:
        """Every distinct row once, queries, values and locations once."""
        pairs = self.requests * self.queries * self.heads
        rows = self.requests * self.distinct * self.row_bytes
        each = pairs * (self.width + self.value_width) * 2
        return Traffic(
            hbm_bytes=rows + each + 4 * self.requests * self.queries * self.k,
            flops=2 * pairs * self.k * (self.width + self.value_width),
        )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random_rows(key: Array, count: int, width: int, scaled: ScaledRow | None) -> Int[Array, "S W"]:
    """Normal rows as records."""
    values = jax.random.normal(key, (count, width), jnp.bfloat16)
    words = encode(values, scaled) if scaled else pack(values)
    return jnp.pad(words, ((0, 0), (0, -words.shape[1] % (ROW_BYTES // WORD_BYTES))))


def step(attend: Callable[..., Attended]) -> Step[tuple[()], Operands, Attended]:
    """Each call has queries and a selection of its own."""

    def one(state: tuple[()], operands: Operands, call: int) -> tuple[tuple[()], Attended]:
        queries, slots, locations = operands
        return state, attend(queries[call], slots, locations[call])

    return one


V4 = SparseAttention(scaled=V4_ENTRY, k=512 + 128)
"""512 selected entries and a window of 128 tokens."""


def _with_queries(name: str, case: SparseAttention) -> dict[str, SparseAttention]:
    """One query; eight, with little overlap and with that of the calibrated traces."""
    eight = dataclasses.replace(case, queries=8)
    return {
        f"128_requests_T1{name}": case,
        f"128_requests_T8{name}": eight,
        f"128_requests_T8_overlap_70{name}": dataclasses.replace(eight, overlap=0.7),
    }


CASES: dict[str, SparseAttention] = {
    **_with_queries("", SparseAttention()),
    "16_requests_T1": SparseAttention(requests=16),
    **_with_queries("_fp8", SparseAttention(scaled=GLM_FP8)),
    **_with_queries("_v4", V4),
}


def row_bytes_of(inputs: Inputs) -> int:
    """Bytes of a row of a shared case."""
    row, query = inputs.row_format, inputs.query
    return row.bytes if isinstance(row, ScaledRow) else query.shape[-1] * query.dtype.itemsize


def shared(inputs: Inputs, backend: Backend) -> AttentionWork:
    """A benchmark of the inputs of a shared case."""
    query, slots, location, sinks, offset, row_format, value_width, scale, _ = inputs
    attend = partial(
        bind(api.sparse_attention, backend),
        sinks=None if sinks is None else jnp.asarray(sinks),
        offset=offset,
        row_format=row_format,
        value_width=value_width,
        scale=scale,
    )
    width, row_bytes = query.shape[-1], row_bytes_of(inputs)
    rows = len(np.unique(location[location >= 0]))
    pairs, selected = query.size // width, location.shape[-1]
    return Work(
        step=step(attend),
        state=(),
        operands=([jnp.asarray(query)], jnp.asarray(slots), [jnp.asarray(location)]),
        calls=1,
        traffic=Traffic(
            hbm_bytes=rows * row_bytes + pairs * (width + value_width) * query.dtype.itemsize,
            flops=2 * pairs * selected * (width + value_width),
        ),
    )
