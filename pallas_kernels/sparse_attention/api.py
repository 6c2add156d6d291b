"""Sparse attention over slots."""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.sparse_attention import mosaic, reference, tpu

# Traced and lowered once for all calls with operands of the same shapes: a model of 78 layers has
# as many calls, and each takes a second.
_STATIC = ("offset", "row_format", "value_width", "scale")
_mosaic = jax.jit(mosaic.sparse_attention, static_argnames=_STATIC)
_tpu = jax.jit(tpu.sparse_attention, static_argnames=_STATIC)


def sparse_attention(  # noqa: PLR0913  # what it reads, and how it reads it
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S *W"],
    location: Int[Array, "R T K"],
    sinks: Float[Array, " H"] | None = None,
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
    backend: Backend | None = None,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """Attention of every query over its selected rows; all heads share a row (MQA).

    `softmax_k(scale * query . row_k)` weights the first `value_width` numbers of the rows: the
    absorbed form of multi-head latent attention (DeepSeek-V2, section 2.1; DeepSeek-V3.2 for the
    sparse form). Softmax in float32. Rows in two precisions are multiplied out in float32 and
    rounded to the dtype of `query`, once.

    A sink is one more logit per head that has no value (DeepSeek-V4):
    it takes weight from the rows. A query that selects the same slot twice counts it twice.

    Args:
        query: absorbed queries, `width` numbers like a row.
        slots: records as int32 words; a row is `width` numbers at word `offset`.
        location: int32 slot of each selected row, in bounds; NO_SLOT masks the entry.
        sinks: logit of each head's sink, if it has one.
        offset: first word of this layer's row within a record.
        row_format: dtype of the numbers in a row, or their format if they have scales.
        value_width: how many leading numbers of a row are its value.
        scale: factor of the logits.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        The weighted values in the dtype of `query`, and float32 `log(sum_k(exp(logit_k)))`, the
        sink included, by which attention over disjoint selections can be merged. A query that
        selects nothing gets zeros, and -inf or its sinks.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    options = {"offset": offset, "row_format": row_format, "value_width": value_width}
    refusal = mosaic.supports(query, slots, **options)
    tpu_refusal = tpu.supports(query, slots, **options)
    match resolve("sparse_attention", backend, refusal=refusal, tpu_refusal=tpu_refusal):
        case "tpu":
            return _tpu(query, slots, location, sinks, scale=scale, **options)
        case "mosaic":
            return _mosaic(query, slots, location, sinks, scale=scale, **options)
        case _:
            return reference.sparse_attention(query, slots, location, sinks, scale=scale, **options)
