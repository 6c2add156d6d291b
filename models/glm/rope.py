"""Rotary position embedding in the two channel layouts that the GLM family uses."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import RopeStyle


def rotate(
    x: Float[Array, "*batch channels"],
    positions: Int[Array, "*#batch"],
    *,
    theta: float,
    style: RopeStyle = "interleaved",
) -> Float[Array, "*batch channels"]:
    """Rotates every channel pair of `x` by its position times the pair's frequency.

    Pair i turns by `positions * theta ** (-2 i / channels)`. A pair is channels (2i, 2i + 1) when
    `style` is "interleaved", and (i, i + channels / 2) when it is "half-split". The pairs stay in
    place, so two vectors may be compared only when both were rotated with one style.

    Args:
        x: Vectors to rotate.
        positions: One position per vector, with length-1 axes where vectors share one (heads).
        theta: Base of the frequencies.
        style: Channel layout.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies.reshape(
        (1,) * positions.ndim + (half,)
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x32 = x.astype(jnp.float32)
    if style == "interleaved":
        pairs = x32.reshape(*x.shape[:-1], half, 2)
        real, imaginary = pairs[..., 0], pairs[..., 1]
    else:
        real, imaginary = x32[..., :half], x32[..., half:]
    turned = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    if style == "interleaved":
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotate_first(
    x: Float[Array, "*batch channels"],
    positions: Int[Array, "*#batch"],
    rotated: int,
    *,
    theta: float,
    style: RopeStyle,
) -> Float[Array, "*batch channels"]:
    """Rotates the first `rotated` channels and keeps the others (index heads)."""
    turned = rotate(x[..., :rotated], positions, theta=theta, style=style)
    return jnp.concatenate((turned, x[..., rotated:]), axis=-1)
