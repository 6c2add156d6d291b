"""One operation after the other, each by its own implementation for the device, or by `backend`."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import Backend
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches, Moves
from pallas_kernels.sparse_attention.api import sparse_attention


def retrieve_attend(
    host: Int[Array, "N *W"],
    slots: Int[Array, "S *W"],
    fetches: Fetches,
    attention: tuple[
        Float[Array, "R T H width"], Int[Array, "R T K"], Int[Array, "R T K"], Int[Array, "R U"]
    ],
    moves: Moves | None,
    *,
    backend: Backend | None,
    **options: Any,  # noqa: ANN401  # those of sparse attention
) -> tuple[tuple[Float[Array, "R T H value"], Float[Array, "R T H"]], Int[Array, "S *W"]]:
    """See `api.retrieve_attend`."""
    query, location, _, _ = attention
    with jax.named_scope("retrieve"):
        slots = retrieve(host, slots, fetches, moves, backend=backend)
    with jax.named_scope("attend"):
        attended = sparse_attention(query, slots, location, backend=backend, **options)
    return attended, slots
