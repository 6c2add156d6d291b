"""4-bit floats (e2m1), two in a byte, the first in the low half.

Source: OCP Microscaling Formats 1.0, section 5.3.3.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 numbers, by their bits."""

E2M1_MAX = 6.0
_SIGN, _HALF = 8, 4
"""The bit of the sign; how far the second number of a byte is shifted."""

_UP, _DOWN = (0.75, 1.75, 3.5), (0.25, 1.25, 2.5, 5.0)
"""Halfway between two numbers, where the one with the even bits is above, or below."""


def unpack_e2m1(raw: UInt8[Array, "*n half"], dtype: DTypeLike) -> Float[Array, "*n width"]:
    """The numbers in bytes, exactly."""
    low = jnp.uint8(2**_HALF - 1)
    halves = jnp.stack((raw & low, raw >> jnp.uint8(_HALF)), axis=-1)
    values = jnp.asarray(E2M1, dtype)[halves.astype(jnp.int32)]
    return values.reshape(*raw.shape[:-1], -1)


def pack_e2m1(values: Float[Array, "*n width"]) -> UInt8[Array, "*n half"]:
    """The numbers nearest to float32 values, ties to even bits; the largest one beyond it."""
    size = jnp.abs(values)
    steps = [size >= step for step in _UP] + [size > step for step in _DOWN]
    bits = sum(step.astype(jnp.uint8) for step in steps)
    bits = bits | (jnp.signbit(values).astype(jnp.uint8) * jnp.uint8(_SIGN))
    pairs = bits.reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << jnp.uint8(_HALF))
