"""Products of few rows with fp8 matrices: the experts of GLM-5.3 on one of eight GPUs."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bench.roofline import Traffic
from bench.shard_weights import random_like
from bench.work import Memory, Work, bind
from pallas_kernels.common.backends import Backend
from pallas_kernels.fp8_products import api
from pallas_kernels.fp8_products.cases import E4M3, Inputs

Operands = list[tuple[Array, Array, Array]]
ProductsWork = Work[tuple[()], Operands, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
    """Random rows and matrices.

    Attributes:
        matrices: E.
        rows: M of each.
        depth: K.
        channels: N.
        calls: of a chain, each with matrices of its own: together more than a cache holds.
    """

    matrices: int = 32
    rows: int
    depth: int
    channels: int
    calls: int = 3

    def small(self) -> Self:
        """See `work.Case`."""
        sizes = {"matrices": 2, "depth": self.depth // 16, "channels": self.channels // 32}
        return dataclasses.replace(self, calls=2, **sizes)

    def memory(self) -> Memory:
        """See `work.Case`. XLA may keep the numbers of a call as bfloat16 beside them."""
        return Memory(0, (self.calls + 3) * self.matrices * self.depth * self.channels)

    def build(self, backend: Backend) -> ProductsWork:
        """See `work.Case`."""
        shapes = (
            jax.ShapeDtypeStruct((self.matrices, self.rows, self.depth), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.matrices, self.channels, self.depth), E4M3),
        )
        scale = jnp.full((self.matrices, self.channels), self.depth**-0.5, jnp.float32)
        return _work([(*random_like(shapes, seed), scale) for seed in range(self.calls)], backend)


def _work(operands: Operands, backend: Backend) -> ProductsWork:
    run, (x, numbers, scale) = bind(api.fp8_products, backend), operands[0]
    made = x.nbytes // x.shape[2] * numbers.shape[1]
    step: Any = lambda state, operands, call: (state, run(*operands[call]))
    return Work(
        step=step,
        state=(),
        operands=operands,
        calls=len(operands),
        traffic=Traffic(
            hbm_bytes=x.nbytes + numbers.nbytes + scale.nbytes + made,
            flops=2.0 * x.shape[1] * numbers.size,
        ),
    )


CASES: dict[str, Products] = {
    f"{name}_{rows}_rows": Products(rows=rows, depth=depth, channels=channels)
    for name, depth, channels in (("gate_up", 6144, 4096), ("down", 2048, 6144))
    for rows in (16, 64)
}


def shared(inputs: Inputs, backend: Backend) -> ProductsWork:
    """A benchmark of the inputs of a shared case."""
    x, numbers, scale = (jnp.asarray(part) for part in inputs)
    return _work([(x, numbers, scale)], backend)
