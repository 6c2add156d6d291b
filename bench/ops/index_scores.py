"""Index scores: every position of long histories against T queries."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bench.roofline import Traffic
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from pallas_kernels.common.backends import Backend
from pallas_kernels.index_scores import api
from pallas_kernels.index_scores.types import Keys, quantise

Operands = tuple[Array, Array, Keys, Array]
"""Queries, weights, keys, and how many positions are visible."""

IndexWork = Work[tuple[()], list[Operands], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexScores:
    """The indexer of GLM-5.x.

    Attributes:
        requests: R.
        queries: T.
        positions: C; all are visible.
        heads: indexer heads.
        width: numbers in a key.
        keys: format of the keys: "bf16", or "fp8" (128 numbers and a float32 scale, 132 B).
        calls: calls of a chain, each on keys of its own.
    """

    requests: int = 16
    queries: int
    positions: int = 100_000
    heads: int = 32
    width: int = 128
    keys: str = "bf16"
    calls: int = 3

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, requests=2, positions=2000, calls=2)

    def memory(self) -> Memory:
        """See `work.Case`. Plain jnp keeps the products of every head, in float32."""
        exact = self.requests * self.positions * self.width * 4
        products = self.requests * self.queries * self.heads * self.positions * 4
        return Memory(0, self.calls * (exact // 2 + products // self.heads) + exact + 3 * products)

    def build(self, backend: Backend) -> IndexWork:
        """See `work.Case`."""
        heads = (self.requests, self.queries, self.heads)
        seen = jnp.full((self.requests, self.queries), self.positions, jnp.int32)
        operands: list[Operands] = []
        for key in jax.random.split(jax.random.key(0), self.calls):
            draw = jax.random.split(key, 3)
            queries = jax.random.normal(draw[0], (*heads, self.width), jnp.bfloat16)
            weights = jax.random.normal(draw[1], heads, jnp.float32)
            shape = (self.requests, self.positions, self.width)
            operands.append((queries, weights, _keys(draw[2], shape, self.keys), seen))
        return _work(operands, backend)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _keys(key: Array, shape: tuple[int, int, int], form: str) -> Keys:
    """Random index keys; fp8 ones from the same numbers as bfloat16 ones."""
    numbers: Float[Array, "R C width"] = jax.random.normal(key, shape, jnp.bfloat16)
    return quantise(numbers) if form == "fp8" else numbers


def _work(operands: list[Operands], backend: Backend) -> IndexWork:
    queries, _, keys, _ = operands[0]
    scores = queries.shape[0] * queries.shape[1] * keys.shape[1]
    return Work(
        step=step(bind(api.index_scores, backend)),
        state=(),
        operands=operands,
        calls=len(operands),
        traffic=Traffic(
            hbm_bytes=keys.nbytes + queries.nbytes + 4 * scores,
            flops=2 * scores * queries.shape[2] * queries.shape[3],
        ),
    )


def step(index_scores: Callable[..., Array]) -> Step[tuple[()], list[Operands], Array]:
    """Each call has operands of its own."""
    return lambda state, operands, call: (state, index_scores(*operands[call]))


CASES: dict[str, IndexScores] = {
    "16_requests_T1": IndexScores(queries=1),
    "16_requests_T8": IndexScores(queries=8),
    "16_requests_T1_fp8": IndexScores(queries=1, keys="fp8"),
    "16_requests_T8_fp8": IndexScores(queries=8, keys="fp8"),
}


def shared(inputs: tuple[np.ndarray, np.ndarray, Any, np.ndarray], backend: Backend) -> IndexWork:
    """A benchmark of the inputs of a shared case."""
    queries, weights, keys, visible = jax.tree.map(jnp.asarray, tuple(inputs))
    return _work([(queries, weights, keys, visible)], backend)
