"""Products with the matrices of `bench.shard_weights`, and what lies between them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bench.shard_weights import Matrix, Mlp
from dhisparse_jax.models.glm.norms import along_last, normalised
from dhisparse_jax.models.share import scaled_product

Times = Callable[[Float[Array, "*n in"], Matrix], Float[Array, "*n out"]]
"""Rows times a matrix, or blocks of rows times one each."""


def rms_norm(x: Float[Array, "*n w"], weight: Float[Array, " w"], eps: float) -> Array:
    """Root mean square norm in float32, in the dtype of `x`."""
    wide = normalised(x.astype(jnp.float32), eps)
    return (wide * along_last(weight.astype(jnp.float32), x.ndim)).astype(x.dtype)


def times(x: Float[Array, "*n in"], matrix: Matrix) -> Float[Array, "*n out"]:
    """`x` times a matrix; sums in float32."""
    return scaled_product(x, matrix.numbers, matrix.scale)


def wide_product(
    x: Float[Array, "*n in"], matrix: Float[Array, "out in"]
) -> Float[Array, "*n out"]:
    """`x` times a bfloat16 matrix, products and sums in float32."""
    return jnp.einsum("...k,nk->...n", x, matrix, preferred_element_type=jnp.float32)


def times_each(x: Float[Array, "e m in"], matrix: Matrix) -> Float[Array, "e m out"]:
    """Every block of rows times its own matrix."""
    numbers = matrix.numbers.astype(x.dtype)
    sums = jnp.einsum("emk,enk->emn", x, numbers, preferred_element_type=jnp.float32)
    return (sums * matrix.scale[:, None]).astype(x.dtype)


def per_head(x: Float[Array, "R T H in"], matrix: Matrix) -> Float[Array, "R T H out"]:
    """Every head times its own matrix."""
    rows = x.reshape(-1, *x.shape[2:]).swapaxes(0, 1)
    return times_each(rows, matrix).swapaxes(0, 1).reshape(*x.shape[:3], -1)


def gated(mlp: Mlp, x: Float[Array, "*n D"], times: Times = times) -> Float[Array, "*n D"]:
    """`down(silu(gate x) * up x)`, of one MLP, or with `times_each` of several."""
    return times(activated(times(x, mlp.gate_up)), mlp.down)


def activated(gate_up: Float[Array, "*n twice"]) -> Float[Array, "*n inner"]:
    """`silu(gate) * up` of both side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
