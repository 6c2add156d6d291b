"""The draft ring: the draft's keys and values of the newest committed positions of each request.

Position p lies in slot p mod C. Only committed positions are ever written, so a write never
destroys what a rejection would bring back, and the position in every slot follows from the number
of committed positions alone. Keys carry their rotation, so the order of slots does not matter.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Shaped

from dhisparse_jax.errors import UserError
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT, dropping, masked


@pytree
class Ring:
    """Keys and values of the newest positions, for every draft layer.

    Attributes:
        keys: normed and rotated keys; numbers, or the words of rows.
        values: values; 0 wide where the keys are the values too.
        next: int32 committed positions of each request, the position that is written next.
    """

    keys: Shaped[Array, "R layers C heads dim"]
    values: Shaped[Array, "R layers C heads value"]
    next: Int[Array, " R"]


def ring_capacity(windows: Sequence[int | None], block: int, positions: int | None = None) -> int:
    """Slots that a draft needs: its widest window and a block, or all positions.

    Args:
        windows: of every draft layer, the query's own position included; None attends to all.
        block: query rows of a proposal.
        positions: most positions of a request, where they are known.

    Raises:
        UserError: a layer attends to everything, and there is no end to that.
    """
    widths = [window for window in windows if window is not None]
    if len(widths) < len(windows):
        if positions is None:
            raise UserError(
                f"draft layer {list(windows).index(None)} attends to the whole history, which a "
                "ring cannot hold; give the draft a sliding window, or a number of positions"
            )
        return positions
    size = max(widths) + block
    return size if positions is None else min(size, positions)


def init_ring(
    requests: int,
    layers: int,
    capacity: int,
    heads: int,
    dim: int,
    dtype: DTypeLike,
    *,
    value_dim: int | None = None,
) -> Ring:
    """A ring of `capacity` slots without any position; values are as wide as keys by default."""
    shape = (requests, layers, capacity, heads)
    return Ring(
        keys=jnp.zeros((*shape, dim), dtype),
        values=jnp.zeros((*shape, dim if value_dim is None else value_dim), dtype),
        next=jnp.zeros(requests, jnp.int32),
    )


def write(
    ring: Ring,
    keys: Shaped[Array, "R layers X heads dim"],
    values: Shaped[Array, "R layers X heads value"],
    start: Int[Array, " R"],
    count: Int[Array, " R"],
) -> Ring:
    """Store positions start .. start + count - 1; of more than C positions, the last C.

    Args:
        ring: the ring.
        keys: new keys; rows from `count` on are ignored.
        values: new values.
        start: int32 position of the first row.
        count: int32 rows to store; 0 leaves a request as it is.
    """
    capacity = ring.keys.shape[2]
    row = jnp.arange(keys.shape[2], dtype=jnp.int32)[None]
    kept = (row < count[:, None]) & (row >= count[:, None] - capacity)
    slot = dropping(masked((start[:, None] + row) % capacity, kept), capacity)
    put = jax.vmap(lambda old, new, at: old.at[:, at].set(new.astype(old.dtype), mode="drop"))
    return Ring(
        keys=put(ring.keys, keys, slot),
        values=put(ring.values, values, slot),
        next=jnp.where(count > 0, start + count, ring.next),
    )


def visible(
    ring: Ring, query_positions: Int[Array, "R B"], window: int | None
) -> tuple[Int[Array, "R C"], Bool[Array, "R B C"]]:
    """What each query of a block sees of the ring.

    With C = 4 and 6 committed positions the slots hold positions 4 5 2 3; with 2 they hold 0 1 - -.

    Args:
        ring: the ring.
        query_positions: int32 positions, at or beyond the committed ones.
        window: positions that a query sees, its own included; None sees all.

    Returns:
        int32 position in every slot, NO_SLOT where there is none, and whether a query sees it.
    """
    capacity = ring.keys.shape[2]
    slot = jnp.arange(capacity, dtype=jnp.int32)[None]
    newest = ring.next[:, None] - 1
    position = slot + capacity * ((newest - slot) // capacity)
    position = jnp.where(position >= 0, position, NO_SLOT)
    seen = jnp.broadcast_to(position[:, None] >= 0, (*query_positions.shape, capacity))
    if window is not None:
        seen &= query_positions[:, :, None] - position[:, None] < window
    return position, seen


def newest_seen(
    ring: Ring, query_positions: Int[Array, "R B"], window: int | None
) -> Int[Array, "R B"]:
    """How many of the newest positions of the ring each query of a block sees; see `visible`."""
    next_position = ring.next[:, None]
    held = jnp.broadcast_to(jnp.minimum(next_position, ring.keys.shape[2]), query_positions.shape)
    if window is None:
        return held
    return jnp.clip(next_position + window - 1 - query_positions, 0, held)


def reset_row(ring: Ring, row: Int[Array, ""]) -> Ring:
    """Forget the positions of one request; what its slots hold is not read any more."""
    return dataclasses.replace(ring, next=ring.next.at[row].set(0))
