"""Sparse attention over slots."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_attention import reference


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S W"],
    location: Int[Array, "R T K"],
    *,
    offset: int,
    row_dtype: DTypeLike,
    value_width: int,
    scale: float,
) -> Float[Array, "R T H value"]:
    """Attention of every query over its selected rows; all heads share a row (MQA).

    `softmax_k(scale * query . row_k)` weights the first `value_width` numbers of the rows: the
    absorbed form of multi-head latent attention (DeepSeek-V2, section 2.1; DeepSeek-V3.2 for the
    sparse form). Softmax in float32.

    Args:
        query: absorbed queries, `width` numbers like a row.
        slots: records as int32 words; a row is `width` numbers of `row_dtype` at word `offset`.
        location: int32 slot of each selected row; NO_SLOT masks the entry.
        offset: first word of this layer's row within a record.
        row_dtype: dtype of the numbers in a row.
        value_width: how many leading numbers of a row are its value.
        scale: factor of the logits.

    Returns:
        The weighted values in the dtype of `query`; zeros for a query that selects nothing.
    """
    return reference.sparse_attention(
        query,
        slots,
        location,
        offset=offset,
        row_dtype=row_dtype,
        value_width=value_width,
        scale=scale,
    )
