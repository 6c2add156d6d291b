"""Which implementation every operation of a decode step gets on this machine, and why.

`packed_products` is none of them: served experts are products of groups of rows without a bound
(`models.stored_experts`), where that operation has so much room for each matrix. Neither is
`round_rows`: served models multiply rows as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.geometry import SCALED_KEYS, Geometry, RowFormat
from dhisparse_jax.hierarchy.group import attend, close_group, open_group
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState, init
from dhisparse_jax.step import finish_step
from pallas_kernels.common.backends import Decision, decisions
from pallas_kernels.draft_attention.api import draft_attention
from pallas_kernels.draft_attention.types import KeysValues, RingSeen
from pallas_kernels.sinkhorn.api import sinkhorn

LATENT, ROTATED, HEADS, TOP_K = 512, 64, 64, 2048
INDEX_WIDTH, INDEX_HEADS = 128, 32
"""Of GLM-5.x and DeepSeek-V3.2."""
BLOCK, DRAFT_HEADS, DRAFT_KEY_HEADS, DRAFT_WIDTH, DRAFT_RING = 8, 64, 16, 64, 2056
"""Of drafts for GLM-5.x."""

FORMATS = ("float32", "bfloat16", "fp8")
"""What rows and index keys are stored in; computed is in float32, or in bfloat16."""


def kernel_choices(stored: str, queries: int = 1) -> dict[str, Decision]:
    """The decision about each operation, for GLM-5.x's sizes and its drafts', and V4.1's streams.

    One selection group of a step is traced over a small hierarchy; nothing of it runs.

    Args:
        stored: one of FORMATS.
        queries: tokens per request and step.
    """
    cfg = HierarchyConfig(
        geometry=_geometry(stored),
        policy=Policy.FIXED,
        requests=1,
        capacity=2 * TOP_K,
        queries=queries,
        hot_rows=TOP_K,
        tail=usual_tail(queries),
    )
    dtype = jnp.float32 if stored == "float32" else jnp.bfloat16

    def shape(*sizes: int, of: DTypeLike = dtype) -> Any:  # noqa: ANN401  # in place of an array
        return jax.ShapeDtypeStruct((1, queries, *sizes), of)

    index = IndexInputs(
        queries=shape(INDEX_HEADS, INDEX_WIDTH),
        weights=shape(INDEX_HEADS, of=jnp.float32),
        keys=shape(INDEX_WIDTH),
    )
    width = LATENT + ROTATED

    def step(
        state: HierarchyState,
        index: IndexInputs,
        row: Float[Array, "R T width"],
        query: Float[Array, "R T H width"],
    ) -> HierarchyState:
        group = open_group(state, cfg, 0, index)
        for layer in range(2):  # the first attention retrieves, those after it do not
            _, group = attend(group, cfg, 0, layer, row, query)
        state = close_group(group, cfg, 0)
        return finish_step(state, cfg, jnp.ones_like(state.length))

    with decisions() as found:
        jax.jit(step).trace(init(cfg), index, shape(width), shape(HEADS, width))
        carry = jax.ShapeDtypeStruct((queries, 4, 4), jnp.float32)
        # Not the functions themselves: what is traced already decides nothing.
        jax.jit(lambda logits: sinkhorn(logits, steps=20, epsilon=1e-6)).trace(carry)
        jax.jit(lambda *operands: draft_attention(*operands)).trace(*_draft_block(dtype))
    # Where an operation is made of others, these decide once more: what comes first counts.
    return {decision.operation: decision for decision in reversed(found)}


def _draft_block(dtype: DTypeLike) -> tuple[Any, ...]:
    """Shapes of the operands of a draft's attention, for one request."""

    def shape(*sizes: int, of: DTypeLike = dtype) -> Any:  # noqa: ANN401  # in place of an array
        return jax.ShapeDtypeStruct((1, *sizes), of)

    ring = shape(1, DRAFT_RING, DRAFT_KEY_HEADS, DRAFT_WIDTH)
    own = shape(BLOCK, DRAFT_KEY_HEADS, DRAFT_WIDTH)
    seen = RingSeen(
        next=shape(of=jnp.int32),
        counts=shape(BLOCK, of=jnp.int32),
        block=jnp.ones((BLOCK, BLOCK), jnp.bool_),
    )
    queries = shape(BLOCK, DRAFT_HEADS, DRAFT_WIDTH)
    return queries, KeysValues(ring, ring), KeysValues(own, own), seen, 0


def _geometry(stored: str) -> Geometry:
    scaled = stored == "fp8"
    plain = lambda: RowFormat(width=LATENT + ROTATED, value_width=LATENT, dtype=stored)
    return Geometry(
        row=RowFormat.fp8(LATENT, ROTATED) if scaled else plain(),
        layers_per_pool=(2,),
        top_k=TOP_K,
        index_width=INDEX_WIDTH,
        index_dtype=SCALED_KEYS if scaled else stored,
        scale=256**-0.5,
    )
