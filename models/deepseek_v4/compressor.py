"""Compression of a history: entries that are gated sums of the tokens of a stretch.

Of every token a compressor keeps the values and the gates of a position; when a stretch of `rate`
positions is complete, its entry is the sum of the values, weighted by a softmax of the gates over
the positions, channel by channel. With overlap a token has two of each: the first for the entry
of the next stretch, the second for that of its own, so that an entry sums up two stretches.
Source: the DeepSeek-V4 report, sections 2.3.1 and 2.3.2.

All of it is float32 whatever the compute dtype, but for the entry at the end.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.models.deepseek_v4.rotary import Rotary
from dhisparse_jax.models.glm.linear import exact_dot, weight_init
from dhisparse_jax.models.glm.norms import RmsNorm


class Compressor(nnx.Module):
    """Weights of one compressor.

    Attributes:
        wkv: to values.
        wgate: to gates.
        ape: what is added to the gates, by place in the stretch.
        rate: positions of a stretch.
        span: positions that an entry sums up: one stretch, or two with overlap.
        raw_width: numbers that are kept of a token.
    """

    def __init__(
        self,
        config: V4Config,
        width: int,
        rate: int,
        *,
        overlap: bool,
        rotary: Rotary,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        channels = (2 if overlap else 1) * width
        init, shape = weight_init(config.hidden_size), (config.hidden_size, channels)
        self.wkv = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.wgate = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.ape = nnx.Param(jnp.zeros((rate, channels), jnp.float32))
        self.norm = RmsNorm(width, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.rotary, self.width, self.rate, self.overlap = rotary, width, rate, overlap
        self.span = (2 if overlap else 1) * rate
        self.raw_width = 2 * channels

    def raw(
        self, x: Float[Array, "*batch hidden"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch raw"]:
        """What to keep of a token until its entries are complete: values, then gates."""
        gates = exact_dot(x, self.wgate[...]) + self.ape[...][positions % self.rate]
        return jnp.concatenate((exact_dot(x, self.wkv[...]), gates), axis=-1)

    def summed_positions(self, entry: Int[Array, "*n"]) -> Int[Array, "*n span"]:
        """Positions that an entry sums up; some of the first one's are negative with overlap."""
        end = (entry[..., None] + 1) * self.rate
        return (
            end
            - self.span
            + jnp.arange(self.span, dtype=jnp.int32).reshape((1,) * entry.ndim + (-1,))
        )

    def entries(
        self,
        raw: Float[Array, "*n span raw"],
        there: Bool[Array, "*n span"],
        entry: Int[Array, "*n"],
    ) -> Float[Array, "*n width"]:
        """Entries out of what was kept of the tokens that they sum up, normalised and rotated.

        Args:
            raw: of the positions that `summed_positions` names.
            there: which of them exist.
            entry: int32 numbers of the entries.
        """
        values, gates = jnp.split(raw, 2, axis=-1)
        if self.overlap:  # the first half of a token's channels is for the next stretch
            values, gates = (self._own_halves(part) for part in (values, gates))
        summed = gated_sum(values, gates, there)
        return self.rotary.rotate_last(self.norm(summed), entry * self.rate)

    def _own_halves(self, part: Float[Array, "*n span twice"]) -> Float[Array, "*n span width"]:
        before, own = part[..., : self.rate, : self.width], part[..., self.rate :, self.width :]
        return jnp.concatenate((before, own), axis=-2)


def gated_sum(
    values: Float[Array, "*n span width"],
    gates: Float[Array, "*n span width"],
    there: Bool[Array, "*n span"],
) -> Float[Array, "*n width"]:
    """Sums over positions, weighted by a softmax of the gates over them, channel by channel."""
    weights = jax.nn.softmax(jnp.where(there[..., None], gates, -jnp.inf), axis=-2)
    # What does not exist may be any bytes, NaN among them.
    return jnp.sum(weights * jnp.where(there[..., None], values, 0.0), axis=-2)
