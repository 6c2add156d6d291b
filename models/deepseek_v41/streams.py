"""What goes from sublayer to sublayer: the streams, and what they weigh in the next one's input."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dhisparse_jax.models.deepseek_v4.hyper import (
    HyperConnection,
    Mixing,
    Streams,
    collapsed,
    connected,
)
from dhisparse_jax.models.glm.norms import RmsNorm


class Carried(NamedTuple):
    """What goes from sublayer to sublayer.

    Attributes:
        streams: the residual streams.
        pre: float32 weights of the streams in the input of the next sublayer.
    """

    streams: Streams
    pre: Float[Array, "*batch streams"]


def before(
    hyper: HyperConnection, norm: RmsNorm, carried: Carried
) -> tuple[Mixing, Float[Array, "R T width"]]:
    """How a sublayer is connected to the streams, and what it reads."""
    with jax.named_scope("streams"):
        return hyper.mixing(carried.streams), norm(collapsed(*carried))


def after(carried: Carried, update: Float[Array, "R T width"], mixing: Mixing) -> Carried:
    """The streams after a sublayer."""
    with jax.named_scope("streams"):
        return Carried(connected(carried.streams, update, mixing), mixing.pre)


def packed(carried: Carried) -> Float[Array, "R T D"]:
    """The streams side by side, then the weights: as the streams' dtype has them, and what is left.

    So float32 weights lose nothing in float32, and keep 16 bits beside bfloat16 streams.
    """
    streams, pre = carried
    flat = streams.reshape(*streams.shape[:-2], -1)
    high = pre.astype(flat.dtype)
    low = (pre - high.astype(jnp.float32)).astype(flat.dtype)
    return jnp.concatenate((flat, high, low), axis=-1)


def unpacked(x: Float[Array, "R T D"], streams: int) -> Carried:
    """The reverse of `packed`."""
    width = x.shape[-1] - 2 * streams
    flat, high, low = jnp.split(x, [width, width + streams], axis=-1)
    pre = high.astype(jnp.float32) + low.astype(jnp.float32)
    return Carried(flat.reshape(*flat.shape[:-1], streams, -1), pre)
