"""Sparse attention over slots."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.sparse_attention import reference, triton


def sparse_attention(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S W"],
    location: Int[Array, "R T K"],
    *,
    offset: int,
    row_dtype: DTypeLike,
    value_width: int,
    scale: float,
    backend: Backend | None = None,
) -> tuple[Float[Array, "R T H value"], Float[Array, "R T H"]]:
    """Attention of every query over its selected rows; all heads share a row (MQA).

    `softmax_k(scale * query . row_k)` weights the first `value_width` numbers of the rows: the
    absorbed form of multi-head latent attention (DeepSeek-V2, section 2.1; DeepSeek-V3.2 for the
    sparse form). Softmax in float32.

    Args:
        query: absorbed queries, `width` numbers like a row.
        slots: records as int32 words; a row is `width` numbers of `row_dtype` at word `offset`.
        location: int32 slot of each selected row, in bounds; NO_SLOT masks the entry.
        offset: first word of this layer's row within a record.
        row_dtype: dtype of the numbers in a row.
        value_width: how many leading numbers of a row are its value.
        scale: factor of the logits.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        The weighted values in the dtype of `query`, and float32 `log(sum_k(exp(logit_k)))`, by
        which attention over disjoint selections can be merged. A query that selects nothing gets
        zeros and -inf.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    options = {
        "offset": offset,
        "row_dtype": row_dtype,
        "value_width": value_width,
        "scale": scale,
    }
    refusal = triton.supports(query, row_dtype=row_dtype, value_width=value_width)
    match resolve("sparse_attention", backend, refusals={"triton": refusal}):
        case "triton":
            return triton.sparse_attention(query, slots, location, **options)
        case "reference":
            return reference.sparse_attention(query, slots, location, **options)
