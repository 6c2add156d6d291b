"""Products of few rows with packed 4-bit matrices: the experts of V4.1-Flash on one of 8 GPUs."""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bench.roofline import Traffic
from bench.shard_weights import random_like
from bench.work import Memory, Work, bind
from dhisparse_jax.engine.timing import Step
from pallas_kernels.common.backends import Backend
from pallas_kernels.packed_products import api
from pallas_kernels.packed_products.cases import BLOCK, Inputs

Operands = list[tuple[Array, Array, Array, Array]]
ProductsWork = Work[tuple[()], Operands, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
    """Random rows and matrices.

    Attributes:
        matrices: E.
        room: M of each.
        rows: how many of them there are.
        depth: K.
        channels: N.
        calls: of a chain, each with matrices of its own: together more than a cache holds.
    """

    matrices: int = 48
    room: int
    rows: int
    depth: int
    channels: int
    calls: int = 3

    def small(self) -> Self:
        """See `work.Case`."""
        return dataclasses.replace(self, calls=2, matrices=2, depth=256, channels=256)

    @property
    def requests(self) -> int:
        """What `bench.tune` checks one of."""
        return self.matrices

    def memory(self) -> Memory:
        """See `work.Case`."""
        return Memory(0, (self.calls + 1) * self.matrices * self.depth * self.channels)

    def build(self, backend: Backend) -> ProductsWork:
        """See `work.Case`."""
        matrix = self.matrices, self.channels
        shapes = {
            "x": jax.ShapeDtypeStruct((self.matrices, self.room, self.depth), jnp.bfloat16),
            "numbers": jax.ShapeDtypeStruct((*matrix, self.depth // 2), jnp.uint8),
            "scales": jax.ShapeDtypeStruct((*matrix, self.depth // BLOCK), jnp.float8_e8m0fnu),
        }
        counts = jnp.full(self.matrices, self.rows, jnp.int32)
        made = [random_like(shapes, seed) for seed in range(self.calls)]
        return _work(
            [(each["x"], each["numbers"], each["scales"], counts) for each in made], backend
        )


def _work(operands: Operands, backend: Backend) -> ProductsWork:
    x, numbers, scales, counts = operands[0]
    rows, (_, channels, half) = int(counts.sum()), numbers.shape
    return Work(
        step=step(bind(api.packed_products, backend)),
        state=(),
        operands=operands,
        calls=len(operands),
        traffic=Traffic(
            hbm_bytes=numbers.nbytes + scales.nbytes + 2 * rows * (x.shape[2] + channels),
            flops=4.0 * rows * half * channels,
        ),
    )


def step(packed_products: Callable[..., Array]) -> Step[tuple[()], Operands, Array]:
    """Each call has matrices of its own."""
    return lambda state, operands, call: (state, packed_products(*operands[call]))


CASES: dict[str, Products] = {
    f"{name}_{rows}_rows": Products(room=room, rows=rows, depth=depth, channels=channels)
    for name, depth, channels in (("gate", 5120, 2304), ("down", 2304, 5120))
    for rows, room in ((8, 32), (48, 96))
}


def shared(inputs: Inputs, backend: Backend) -> ProductsWork:
    """A benchmark of the inputs of a shared case."""
    x, numbers, scales, counts = (jnp.asarray(part) for part in inputs)
    return _work([(x, numbers, scales, counts)], backend)
