"""Products with the matrices of `bench.shard_weights`, and what lies between them."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from bench.shard_weights import Matrix, Mlp
from dhisparse_jax.models.glm.norms import along_last, normalised
from dhisparse_jax.models.share import Rounded, gated_rounded, scaled, scaled_product

Sums = Callable[[Rounded, Matrix, DTypeLike], Float[Array, "*n out"]]
"""Rows times a matrix, or blocks of rows times one each, in a dtype; not scaled."""


def rms_norm(x: Float[Array, "*n w"], weight: Float[Array, " w"], eps: float) -> Array:
    """Root mean square norm in float32, in the dtype of `x`."""
    wide = normalised(x.astype(jnp.float32), eps)
    return (wide * along_last(weight.astype(jnp.float32), x.ndim)).astype(x.dtype)


def times(x: Rounded, matrix: Matrix, dtype: DTypeLike) -> Float[Array, "*n out"]:
    """Rows times a matrix."""
    return scaled_product(x, matrix.numbers, matrix.scale, dtype)


def wide_product(
    x: Float[Array, "*n in"], matrix: Float[Array, "out in"]
) -> Float[Array, "*n out"]:
    """`x` times a bfloat16 matrix, products and sums in float32."""
    return jnp.einsum("...k,nk->...n", x, matrix, preferred_element_type=jnp.float32)


def sums_of(x: Rounded, matrix: Matrix, dtype: DTypeLike) -> Float[Array, "*n out"]:
    """Rows times a matrix."""
    return jnp.einsum("...k,nk->...n", x.numbers, matrix.numbers, preferred_element_type=dtype)


def sums_of_each(x: Rounded, matrix: Matrix, dtype: DTypeLike) -> Float[Array, "e m out"]:
    """Every block of rows times its own matrix."""
    return jnp.einsum("emk,enk->emn", x.numbers, matrix.numbers, preferred_element_type=dtype)


def per_head(x: Float[Array, "R T H in"], matrix: Matrix) -> Float[Array, "R T H out"]:
    """Every head times its own matrix. These rows are not rounded: heads have few numbers each."""
    rows = x.reshape(-1, *x.shape[2:]).swapaxes(0, 1)
    numbers = matrix.numbers.astype(x.dtype)
    sums = jnp.einsum("emk,enk->emn", rows, numbers, preferred_element_type=jnp.float32)
    out = (sums * matrix.scale[:, None]).astype(x.dtype)
    return out.swapaxes(0, 1).reshape(*x.shape[:3], -1)


def gated(mlp: Mlp, x: Rounded, dtype: DTypeLike, sums: Sums = sums_of) -> Float[Array, "*n D"]:
    """`down(silu(gate x) * up x)`, of one MLP, or with `sums_of_each` of several."""
    inner = gated_rounded(sums(x, mlp.gate_up, dtype), x.scales, mlp.gate_up.scale)
    out, scale = sums(inner, mlp.down, dtype), mlp.down.scale
    scale = along_last(scale, out.ndim) if scale.ndim == 1 else scale[:, None]
    return scaled(out, inner.scales[..., None], scale)
