"""Attention of a draft's block over its ring: the drafts of GLM-5.x, whose windows are full."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.roofline import Traffic
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from pallas_kernels.common.backends import Backend
from pallas_kernels.draft_attention import api
from pallas_kernels.draft_attention.cases import Inputs
from pallas_kernels.draft_attention.types import KeysValues, RingSeen

Operands = tuple[Array, KeysValues, KeysValues, RingSeen, list[int]]
"""Of the operation, and the layer of each call."""

DraftWork = Work[tuple[()], Operands, Array]

WINDOW = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAttention:
    """Random rows of one block per request, over every layer of a ring in turn.

    Attributes:
        requests: R.
        block: T.
        layers: of the ring; each call reads one, which no call before it has read.
        heads: H.
        kv: heads of keys and values.
        dim: numbers of a head.
        window: positions that a row sees, its own included.
    """

    requests: int
    block: int = 8
    layers: int = 5
    heads: int = 64
    kv: int = 16
    dim: int = 64
    window: int = WINDOW

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, requests=2, layers=2, heads=8, kv=2, dim=16, window=64)

    @property
    def _ring(self) -> tuple[int, ...]:
        return self.requests, self.layers, self.window + self.block, self.kv, self.dim

    def memory(self) -> Memory:
        """See `work.Case`. Plain jnp keeps logits and transposed keys and values."""
        rows = self.requests * self.block * self.heads * self._ring[2]
        return Memory(0, int(4 * np.prod(self._ring) + 12 * rows))

    def build(self, backend: Backend) -> DraftWork:
        """See `work.Case`."""
        own = self.requests, self.block, self.kv, self.dim
        shapes = (self.requests, self.block, self.heads, self.dim), *[self._ring] * 2, own, own
        keys = jax.random.split(jax.random.key(0), len(shapes))
        queries, *others = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys, shapes, strict=True)
        )
        row = np.arange(self.block, dtype=np.int32)
        seen = RingSeen(
            next=jnp.asarray(10 * self.window + 7 * np.arange(self.requests), jnp.int32),
            counts=jnp.tile(self.window - 1 - row, (self.requests, 1)),
            block=jnp.ones((self.block, self.block), jnp.bool_),
        )
        ring, both = KeysValues(*others[:2]), KeysValues(*others[2:])
        return _work((queries, ring, both, seen, list(range(self.layers))), backend)


def _work(operands: Operands, backend: Backend) -> DraftWork:
    queries, ring, own, seen, layers = operands
    _, _, _, kv, dim = ring.keys.shape
    held = int(jnp.max(seen.counts, axis=1).sum())
    shown = int(seen.counts.sum()) + queries.shape[0] * int(seen.block.sum())
    rows = 2 * queries.nbytes + own.keys.nbytes + own.values.nbytes
    return Work(
        step=step(bind(api.draft_attention, backend)),
        state=(),
        operands=operands,
        calls=len(layers),
        traffic=Traffic(
            hbm_bytes=2 * held * kv * dim * ring.keys.dtype.itemsize + rows,
            flops=4.0 * shown * queries.shape[2] * dim,
        ),
    )


def step(attend: Callable[..., Any]) -> Step[tuple[()], Operands, Array]:
    """Each call has a layer of its own."""

    def one(state: tuple[()], operands: Operands, call: int) -> tuple[tuple[()], Array]:
        *others, layers = operands
        return state, attend(*others, layers[call])

    return one


CASES: dict[str, DraftAttention] = {
    "dflash2_16_requests": DraftAttention(requests=16),
    "dflash2_4_requests": DraftAttention(requests=4),
    "dflash2_1_request": DraftAttention(requests=1),
    "dspark_16_requests": DraftAttention(requests=16, block=7, layers=3),
}


def shared(inputs: Inputs, backend: Backend) -> DraftWork:
    """A benchmark of the inputs of a shared case."""
    queries, ring, own, seen, layer = inputs
    return _work((queries, ring, own, seen, [layer]), backend)
