"""Rotary positions of one layer: the last channels of every head, interleaved, in place."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v4 import V4Sizes
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.models.glm.rope import rotate


@dataclass(frozen=True)
class Rotary:
    """Which channels turn, and how fast.

    Attributes:
        channels: how many of the last ones.
        theta: base of the frequencies.
        yarn: how positions are stretched.
    """

    channels: int
    theta: float
    yarn: Yarn | None

    def rotate_last(
        self, x: Float[Array, "*batch channels"], positions: Int[Array, "*#batch"]
    ) -> Float[Array, "*batch channels"]:
        """Rotates by `positions`; by negative ones back."""
        kept, turning = x[..., : -self.channels], x[..., -self.channels :]
        turned = rotate(turning, positions, theta=self.theta, yarn=self.yarn)
        return jnp.concatenate((kept, turned), axis=-1)


def rotary_of(config: V4Sizes, *, entries: bool) -> Rotary:
    """That of a layer: with its own base, and stretched, wherever there are entries."""
    if not entries:
        return Rotary(config.rope_dim, config.rope_theta, None)
    return Rotary(config.rope_dim, config.compress_theta, config.yarn)
