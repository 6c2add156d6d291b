"""Rotary position embedding in the two channel layouts that the GLM family uses."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import RopeStyle
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.models.frequencies import rope_frequencies


def rotate(
    x: Float[Array, "*batch channels"],
    positions: Int[Array, "*#batch"],
    *,
    theta: float,
    style: RopeStyle = "interleaved",
    yarn: Yarn | None = None,
) -> Float[Array, "*batch channels"]:
    """Rotates every channel pair of `x` by its position times the pair's frequency.

    The frequencies are those of `models.frequencies`. A pair is channels (2i, 2i + 1) when
    `style` is "interleaved", and (i, i + channels / 2) when it is "half-split". The pairs stay in
    place, so two vectors may be compared only when both were rotated with one style.

    Args:
        x: Vectors to rotate.
        positions: One position per vector, with length-1 axes where vectors share one (heads).
        theta: Base of the frequencies.
        style: Channel layout.
        yarn: How positions are stretched.
    """
    half = x.shape[-1] // 2
    frequencies = jnp.asarray(rope_frequencies(x.shape[-1], theta, yarn), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies.reshape(
        (1,) * positions.ndim + (half,)
    )
    amplitude = yarn.amplitude if yarn else 1.0
    cos, sin = amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)
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
    yarn: Yarn | None = None,
) -> Float[Array, "*batch channels"]:
    """Rotates the first `rotated` channels and keeps the others (index heads)."""
    turned = rotate(x[..., :rotated], positions, theta=theta, style=style, yarn=yarn)
    return jnp.concatenate((turned, x[..., rotated:]), axis=-1)
