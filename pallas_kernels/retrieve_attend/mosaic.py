"""Retrieval and attention on a Hopper GPU: the kernel of sparse attention, which fetches both ways.

Before the role that fetches rows fills a stage, it brings the missing records of that block from
the host (`sparse_attention.mosaic_records`). Every CUDA block brings what its own part of a
selection lacks, so none waits for another, and the order of sums is that of plain attention.

Traffic: as retrieval and attention have it; a fetched row is read again, from L2.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.ids import INT32_MAX, in_range, masked
from pallas_kernels.common.memory_space import as_device
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches, Moves, counted, wanted_targets
from pallas_kernels.sparse_attention import mosaic as attention_kernel
from pallas_kernels.sparse_attention.mosaic_work import BLOCK, HEADS


def supports(
    query: Float[Array, "R T H width"],
    slots: Int[Array, "S *W"],
    *,
    offset: int,
    row_format: DTypeLike | ScaledRow,
    value_width: int,
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    _, queries, heads, _ = query.shape
    if queries > 1:
        return f"{queries} queries per request (only 1: others share what they miss)"
    if heads > HEADS:
        return f"{heads} heads (at most {HEADS}: blocks of them share rows)"
    return attention_kernel.supports(
        query, slots, offset=offset, row_format=row_format, value_width=value_width
    )


def retrieve_attend(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    fetches: Fetches,
    attention: tuple[
        Float[Array, "R 1 H width"], Int[Array, "R 1 K"], Int[Array, "R 1 K"], Int[Array, "R U"]
    ],
    moves: Moves | None,
    **options: Any,  # those of sparse attention
) -> tuple[tuple[Float[Array, "R 1 H value"], Float[Array, "R 1 H"]], Int[Array, "S W"]]:
    """See `api.retrieve_attend`."""
    query, location, selection, missing = attention
    if moves is not None:
        nothing = fetches._replace(counts=0 * fetches.counts)
        slots = retrieve(host, slots, nothing, moves, backend="triton")
    brought = _brought(host, slots, fetches, missing, selection[:, 0])
    return attention_kernel.retrieve_attend(query, slots, location, brought, **options)


def _brought(
    host: Int[Array, "N W"],
    slots: Int[Array, "S W"],
    fetches: Fetches,
    missing: Int[Array, "R U"],
    selection: Int[Array, "R K"],
) -> attention_kernel.Brought:
    """The fetches as the kernel takes them: by block, with ids that exist or are NO_SLOT."""
    targets = wanted_targets(fetches)
    return attention_kernel.Brought(
        host=as_device(host),
        rows=masked(fetches.rows, in_range(fetches.rows, host.shape[0])),
        targets=masked(targets, in_range(targets, slots.shape[0])),
        before=_before(jnp.where(counted(fetches), missing, INT32_MAX), selection),
    )


def _before(positions: Int[Array, "R U"], selection: Int[Array, "R K"]) -> Int[Array, "R blocks"]:
    """How many fetches the blocks before each block of the selection need; at the end, all.

    Selected 3, 5, 8, 9, 12 in blocks of 2, fetched 5, 9, 12: 0 before block 0, 1 before block 1
    (which starts at 8), 2 before block 2 (at 12), and 3 at the end.
    """
    starts = jnp.where(selection < 0, INT32_MAX, selection)[:, ::BLOCK]
    ends = jnp.full((len(starts), 1), INT32_MAX, jnp.int32)
    bounds = jnp.concatenate([starts, ends], axis=1)
    return (positions[:, None] < bounds[:, :, None]).sum(axis=2, dtype=jnp.int32)
