"""Engram: rows of a table, looked up by the n-grams that end with a token, added to the streams.

All rows of a token side by side become one key per stream and one value. A stream takes as much of
the value as its key says: with d = (RMS(X_j) . (q_j k_j RMS(key_j))) / sqrt(width), it is
sigmoid(sign(d) sqrt(max(|d|, 1e-6))). Source: DeepSeek-V4.1.

Gates and sums are float32 whatever the compute dtype.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.quantised import FLOAT, FORMATS
from dhisparse_jax.models.deepseek_v4.hyper import Streams
from dhisparse_jax.models.deepseek_v41.ngrams import multipliers_of, table_rows
from dhisparse_jax.models.glm.linear import linear, weight_init
from dhisparse_jax.models.glm.norms import normalised

LEAST = 1e-6
"""Of |d|, under the root."""


class Table(nnx.Module):
    """Rows of numbers; as small as a checkpoint stores them, or as floats.

    Attributes:
        weight: the rows; None where they stay quantised.
        numbers: e4m3, in their place.
        scales: e8m0, one for every so many numbers of a row.
    """

    def __init__(
        self, rows: int, width: int, form: str, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.form = form
        weight: nnx.Param[jax.Array] | None = None
        numbers: nnx.Param[jax.Array] | None = None
        scales: nnx.Param[jax.Array] | None = None
        if form == FLOAT:
            weight = nnx.Param(weight_init(width)(rngs.params(), (rows, width), dtype))
        else:
            shape = FORMATS[form].scale_shape(rows, width)
            numbers = nnx.Param(jnp.zeros((rows, width), ml_dtypes.float8_e4m3fn))
            scales = nnx.Param(jnp.ones(shape, FORMATS[form].scale))
        self.weight, self.numbers, self.scales = weight, numbers, scales

    def __call__(self, rows: Int[Array, "*n"]) -> Float[Array, "*n width"]:
        """Rows by number, float32: exactly what they stand for."""
        if self.weight is not None:
            return self.weight[...][rows].astype(jnp.float32)
        assert self.numbers is not None  # one of the two forms is there
        assert self.scales is not None
        numbers = self.numbers[...][rows].astype(jnp.float32)
        scales = self.scales[...][rows].astype(jnp.float32)
        scales = jnp.repeat(scales, FORMATS[self.form].block[1], axis=-1)
        return numbers * scales[..., : numbers.shape[-1]]


class Engram(nnx.Module):
    """The memory before one layer.

    Attributes:
        table: what n-grams are looked up in.
        wkv: from the rows of a token to the keys of all streams and the value.
        q_weight: weights of each stream, normalised.
        k_weight: weights of its key, normalised; only their product with those is used.
    """

    def __init__(self, config: V41Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        place = config.engram_layers.index(layer)
        width, streams = config.hidden_size, config.streams
        param_dtype = jnp.dtype(config.param_dtype)
        self.table = Table(
            config.engram_rows[place],
            config.engram_dim,
            config.table_format,
            dtype=param_dtype,
            rngs=rngs,
        )
        self.wkv = linear(
            config.engram_columns * config.engram_dim,
            (streams + 1) * width,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.q_weight = nnx.Param(jnp.ones((streams, width), param_dtype))
        self.k_weight = nnx.Param(jnp.ones((streams, width), param_dtype))
        self.multipliers = multipliers_of(layer, config.engram_order, config.engram_vocab)
        self.primes = config.engram_primes()[place]
        self.streams, self.epsilon, self.dtype = streams, config.norm_eps, dtype

    def __call__(self, x: Streams, ids: Int[Array, "*batch order"]) -> Streams:
        """The streams with what is known of these tokens.

        Args:
            x: streams of every token.
            ids: int32 ids of the token and of those before it, the newest first.
        """
        rows = self.table(table_rows(ids, self.multipliers, self.primes)).astype(self.dtype)
        both = self.wkv(rows.reshape(*rows.shape[:-2], -1)).astype(jnp.float32)
        keys, value = jnp.split(both, [self.streams * x.shape[-1]], axis=-1)
        gates = self.gates(x, keys.reshape(x.shape))
        return (x.astype(jnp.float32) + gates[..., None] * value[..., None, :]).astype(x.dtype)

    def gates(self, x: Streams, keys: Streams) -> Float[Array, "*batch streams"]:
        """How much of the value each stream takes."""
        wide = x.astype(jnp.float32)
        weight = self.q_weight[...].astype(jnp.float32) * self.k_weight[...].astype(jnp.float32)
        weight = weight.reshape((1,) * (x.ndim - 2) + weight.shape)
        product = normalised(wide, self.epsilon) * weight * normalised(keys, self.epsilon)
        d = jnp.sum(product, axis=-1) * x.shape[-1] ** -0.5
        return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(d), LEAST)), d))
