"""What layers of a served model have in common: their window, and what is attended beside it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.model import AttendFn, OpenFn
from dhisparse_jax.models.deepseek_v4.attention import Projected, WindowAttention
from dhisparse_jax.models.deepseek_v4.store import NEAR, Key, Store


class Place(NamedTuple):
    """Where a layer stands, and how it reaches records.

    Attributes:
        layer: its number.
        positions: int32 position of every token.
        open_group: see `dhisparse_jax.model.OpenFn`.
        attend: see `dhisparse_jax.model.AttendFn`.
    """

    layer: int
    positions: Int[Array, "R T"]
    open_group: OpenFn[Any]
    attend: AttendFn[Any]


def attend_window(
    attention: WindowAttention, projected: Projected, place: Place, store: Store
) -> tuple[Attended, Store]:
    """Attention over the newest positions and the sinks; the store has the new rows then."""
    key = Key(place.layer, NEAR)
    store = store.put_rows(key, place.positions, projected.row)
    window = store.newest(key, place.positions)
    return store.attend(key, window, projected.query, attention.sinks[...]), store


def new_entries(positions: Int[Array, "R T"], rate: int) -> Int[Array, "R E"]:
    """Numbers of the entries that new tokens can complete, one for every `rate` positions."""
    count = -(-positions.shape[1] // rate)
    return positions[:, :1] // rate + jnp.arange(count, dtype=jnp.int32).reshape(1, -1)


def merged(near: Attended, far: Attended) -> Attended:
    """Attention over two sets of rows at once, from that over each; one of them is not empty."""
    lse = jnp.logaddexp(near.lse, far.lse)
    parts: list[Float[Array, "R T H value"]] = [
        part.values.astype(jnp.float32) * jnp.exp(part.lse - lse)[..., None] for part in (near, far)
    ]
    return Attended((parts[0] + parts[1]).astype(near.values.dtype), lse)
