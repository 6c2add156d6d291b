"""Index keys: numbers of 16 or 32 bits, of 8 bits with a scale per key, or of 4 bits as rows."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.scaled_rows import ScaledRow, rescaled, scales_of


class ScaledKeys(NamedTuple):
    """fp8 keys, 132 bytes for 128 numbers: a key is `scale * numbers`.

    Numbers and scales are two arrays and not 132-byte rows: the copy engine of a GPU lays a tile
    out as the matrix units want it only if rows are multiples of 16 bytes, and the scales of a tile
    are a contiguous run.

    Attributes:
        numbers: e4m3.
        scales: float32.
    """

    numbers: Float[Array, "*n width"]
    scales: Float[Array, "*n"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers: requests, positions and width, where there are those axes."""
        return self.numbers.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the numbers."""
        return self.numbers.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers.nbytes + self.scales.nbytes


Keys = Float[Array, "R C width"] | ScaledKeys | Int[Array, "R C words"]
"""Words are rows of `packed_format`."""

MOST_PACKED = 32
"""4-bit numbers that share a scale, at most."""


def packed_format(width: int) -> ScaledRow:
    """The format of keys of 4-bit numbers: powers of two as scales, 68 bytes for 128 numbers."""
    group = math.gcd(width, MOST_PACKED)
    return ScaledRow(quantised=width, group=group, scale="e8m0", rest=0, numbers="e2m1")


def quantise(keys: Float[Array, "*n width"], *, power_scales: bool = False) -> ScaledKeys:
    """The e4m3 keys nearest to `keys`, with the scales of `scales_of`.

    The error of a number is at most 2^-4 of it, or 2^-10 of the scale where it is small.
    """
    exact = keys.astype(jnp.float32)
    scales = scales_of(exact, power_scales=power_scales)
    return ScaledKeys(numbers=rescaled(exact, scales), scales=scales)
