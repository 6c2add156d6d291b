"""Scores to select from, at production sizes: easy ones, and those that are hard on a radix."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class TopKSize(NamedTuple):
    """Rows of so many positions, the best `k` of each."""

    rows: int
    positions: int
    k: int

    @property
    def name(self) -> str:
        """The case."""
        return f"{self.k}_of_{self.positions}_x{self.rows}"


TOP_K_SIZES = (TopKSize(128, 100_000, 2048), TopKSize(128, 125_000, 512))
FEW_ROWS = TopKSize(16, 100_000, 2048)

SMALL_TOP_K = TopKSize(4, 9000, 256)


def normal(key: Array, shape: tuple[int, ...]) -> Float[Array, "R T C"]:
    """Independent scores without a tie."""
    return jax.random.normal(key, shape)


def mostly_zero(key: Array, shape: tuple[int, ...]) -> Float[Array, "R T C"]:
    """The K-th place is a tie of nearly all positions."""
    return jnp.maximum(jax.random.normal(key, shape) - 2.5, 0.0)


def all_equal(key: Array, shape: tuple[int, ...]) -> Float[Array, "R T C"]:
    """One tie of all positions."""
    return jnp.broadcast_to(jax.random.normal(key, (*shape[:2], 1)), shape)


def clustered(key: Array, shape: tuple[int, ...]) -> Float[Array, "R T C"]:
    """The newest positions score best, and neighbours alike."""
    recent = jnp.exp(-jnp.arange(shape[-1], dtype=jnp.float32)[::-1] / 3000)[None, None]
    return recent + 0.01 * jax.random.normal(key, shape)


def little_visible(key: Array, shape: tuple[int, ...]) -> Float[Array, "R T C"]:
    """All but the first positions are not selectable."""
    seen = jnp.arange(shape[-1], dtype=jnp.int32) < shape[-1] // 40
    return jnp.where(seen[None, None], jax.random.normal(key, shape), -jnp.inf)


DISTRIBUTIONS = (normal, mostly_zero, all_equal, clustered, little_visible)
