"""Retrieval of what a step misses, and the attention that reads it, in one launch."""

from functools import partial
from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend, resolve
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.retrieve.api import check_pools
from pallas_kernels.retrieve.types import Fetches, Moves
from pallas_kernels.retrieve_attend import mosaic, reference

# Traced and lowered once for all groups of layers: see `sparse_attention.api`.
_mosaic = jax.jit(
    mosaic.retrieve_attend, static_argnames=("offset", "row_format", "value_width", "scale")
)


class Attention(NamedTuple):
    """What attention reads; see `sparse_attention.api`.

    Attributes:
        query: absorbed queries.
        location: int32 slot of each selected row once it has been fetched; NO_SLOT masks.
        selection: int32 position of each selected row, in ascending order, then NO_SLOT.
        missing: int32 position of each fetch, entry by entry.
    """

    query: Float[Array, "R T H width"]
    location: Int[Array, "R T K"]
    selection: Int[Array, "R T K"]
    missing: Int[Array, "R U"]


def retrieve_attend(  # noqa: PLR0913  # what is read, and how it is read
    host: Int[Array, "N *_"],
    slots: Int[Array, "S *W"],
    fetches: Fetches,
    attention: Attention,
    moves: Moves | None = None,
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
    scale: float,
    backend: Backend | None = None,
) -> tuple[tuple[Float[Array, "R T H value"], Float[Array, "R T H"]], Int[Array, "S *W"]]:
    """`retrieve`, then `sparse_attention` over the slots, with the same results bit by bit.

    The attention works on rows that are there while missing records come over the link. Positions
    are what tells which rows a block of the selection has to wait for, so fetches are in ascending
    order of position and every one of them is selected; that is how `plan` lists them for one query
    with an ascending selection, as `top_k` gives it. No request reads a slot that another one
    fetches into.

    Args:
        host: see `retrieve.api`.
        slots: see `retrieve.api`; donated by the caller's `jit`.
        fetches: see `retrieve.api`; their positions, `attention.missing`, ascend up to the counts.
        attention: queries, and what they select.
        moves: see `retrieve.api`.
        offset: see `sparse_attention.api`, as all that follows.
        row_format: format of a row.
        value_width: leading numbers of a row that are its value.
        scale: factor of the logits.
        backend: the implementation; by default the one for the device JAX runs on, or one operation
            after the other where that one does not take the operands.

    Returns:
        Values and log-sum-exp, and the slots with the records in place.

    Raises:
        ValueError: see `retrieve.api`.
        NotImplementedError: if the named backend does not take operands like these.
    """
    check_pools(host, slots)
    options = {"offset": offset, "row_format": row_format, "value_width": value_width}
    refusal = mosaic.supports(attention.query, slots, **options)
    match resolve("retrieve_attend", backend, refusal=refusal):
        case "mosaic":
            run = _mosaic
        case _:
            run = partial(reference.retrieve_attend, backend=backend)
    return run(host, slots, fetches, attention, moves, scale=scale, **options)
