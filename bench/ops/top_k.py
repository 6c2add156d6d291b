"""Exact top-K of the scores of long histories."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.roofline import Traffic
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from pallas_kernels.common.backends import Backend
from pallas_kernels.top_k import api

TopKWork = Work[tuple[()], list[Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """Normal scores.

    Attributes:
        requests: R; one query each.
        positions: C.
        k: K.
        calls: calls of a chain, each on scores of its own: together more than a cache holds.
    """

    requests: int = 128
    positions: int
    k: int
    calls: int = 6

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, requests=2, positions=4000, k=self.k // 16, calls=2)

    def memory(self) -> Memory:
        """See `work.Case`. A sort keeps keys and positions twice."""
        return Memory(0, (self.calls + 6) * self.requests * self.positions * 4)

    def build(self, backend: Backend) -> TopKWork:
        """See `work.Case`."""
        shape = (self.requests, 1, self.positions)
        keys = jax.random.split(jax.random.key(0), self.calls)
        return _work([jax.random.normal(key, shape) for key in keys], self.k, backend)


def _work(operands: list[Array], k: int, backend: Backend) -> TopKWork:
    rows = operands[0].size // operands[0].shape[-1]
    return Work(
        step=_step(partial(bind(api.top_k, backend), k=k)),
        state=(),
        operands=operands,
        calls=len(operands),
        traffic=Traffic(hbm_bytes=operands[0].nbytes + 4 * rows * k),
    )


def _step(top_k: Callable[..., Array]) -> Step[tuple[()], list[Array], Array]:
    return lambda state, operands, call: (state, top_k(operands[call]))


CASES: dict[str, TopK] = {
    "2048_of_100000": TopK(positions=100_000, k=2048),
    "512_of_125000": TopK(positions=125_000, k=512),
}


def shared(inputs: tuple[np.ndarray, int], backend: Backend) -> TopKWork:
    """A benchmark of the inputs of a shared case."""
    scores, k = inputs
    return _work([jnp.asarray(scores)], k, backend)
