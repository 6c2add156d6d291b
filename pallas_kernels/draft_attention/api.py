"""Attention of a draft's block over its ring."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.draft_attention import reference, triton
from pallas_kernels.draft_attention.types import KeysValues, RingSeen

# Traced and lowered once for all layers: see `sparse_attention.api`.
_triton = jax.jit(triton.draft_attention)


def draft_attention(
    queries: Float[Array, "R T H dim"],
    ring: KeysValues,
    own: KeysValues,
    seen: RingSeen,
    layer: int | Int[Array, ""],
    *,
    backend: Backend | None = None,
) -> Float[Array, "R T H dim"]:
    """Attention of the rows of one block per request over the newest positions, and the block.

    `softmax(queries . keys / sqrt(dim))` weights the values; `H / kv` query heads, in order, share
    a key head (grouped-query attention, Ainslie et al., 2023). Logits, softmax and sums are
    float32; weights are rounded to the dtype of the values.

    A ring has all layers, as it lies in memory, so that none has to be copied out of it.

    Args:
        queries: normed and rotated, in the dtype of keys and values.
        ring: `[R, layers, C, kv, dim]`; position p lies in slot p mod C. What no row sees is
            finite, or the reference gives NaN.
        own: `[R, T, kv, dim]`, of the block's rows.
        seen: what the rows see. A row sees itself, so no row sees nothing.
        layer: which layer of the ring.
        backend: the implementation; by default the one for the device JAX runs on, if it takes
            operands like these.

    Returns:
        In the dtype of `queries`; backends differ in the order of sums.

    Raises:
        NotImplementedError: if the named backend does not take operands like these.
    """
    match resolve("draft_attention", backend, refusal=triton.supports(queries, ring, own)):
        case "triton":
            return _triton(queries, ring, own, seen, layer)
        case _:
            return reference.draft_attention(queries, ring, own, seen, layer)
