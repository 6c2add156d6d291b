"""The experts of one GPU's share: which tokens each gets, and running them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from bench.shard_products import wide_product
from bench.shard_weights import Moe, mixed
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.glm.norms import along_last
from pallas_kernels.common.rows import pack, unpack

SPREAD = 5.5
"""Standard deviations above its mean load for which an expert has room."""

ROOM_UNIT = 16
"""Rows of an expert come in multiples of it: those of a tile of the matrix units."""


def route(
    config: GlmConfig, moe: Moe, x: Float[Array, "R T D"]
) -> tuple[Int[Array, "R T chosen"], Float[Array, "R T chosen"]]:
    """Experts of every token and the weights of their outputs, as `models.glm.moe.Router`."""
    scores = jax.nn.sigmoid(wide_product(x, moe.router))
    _, expert = jax.lax.top_k(scores + along_last(moe.bias, scores.ndim), config.experts_per_token)
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return expert, weight * config.routed_scale


def uniform_picks(
    positions: Int[Array, "R T"], layer: int, picks: int, experts: int
) -> Int[Array, "R T picks"]:
    """Random experts, another draw for every request, position, layer and pick."""
    request = jnp.arange(positions.shape[0], dtype=jnp.uint32)[:, None, None]
    pick = jnp.arange(picks, dtype=jnp.uint32)[None, None]
    where = positions.astype(jnp.uint32)[..., None] * jnp.uint32(4096) + request
    word = mixed(where ^ mixed(pick * jnp.uint32(1024) + jnp.uint32(layer + 1)))
    return (word >> 8).astype(jnp.int32) % experts


def expert_room(pairs: int, experts: int) -> int:
    """Rows for each expert: more than `SPREAD` standard deviations of its load above the mean."""
    mean = pairs / experts
    most = min(pairs, math.ceil(mean + SPREAD * math.sqrt(mean)))
    return -(-most // ROOM_UNIT) * ROOM_UNIT


Blocks = Callable[[Any, Int[Array, " e"]], Float[Array, "e m D"]]
"""A block of rows of every expert, in the form that they came in, and how many of them there are,
through it."""


def run_experts(
    run: Blocks,
    count: int,
    x: Any,  # noqa: ANN401  # arrays with a row per token, as the experts take them
    expert: Int[Array, "n picks"],
    weight: Float[Array, "n picks"],
) -> Float[Array, "n D"]:
    """The weighted sum of the picked ones' outputs, of so many experts.

    Every expert gets `expert_room` rows, and its picks in the order of the tokens. What finds no
    room is left out: less than one pick in a thousand steps of 75 layers.
    """
    picks = expert.shape[1]
    room = expert_room(expert.size, count)
    flat = expert.reshape(-1)
    mine = flat[:, None] == jnp.arange(count, dtype=jnp.int32)[None]
    rank = jnp.where(mine, jnp.cumsum(mine, axis=0, dtype=jnp.int32) - 1, 0).sum(axis=1)
    place = jnp.where(rank < room, flat * room + rank, count * room)
    token = jnp.arange(flat.shape[0], dtype=jnp.int32) // picks
    source = jnp.zeros(count * room, jnp.int32).at[place].set(token, mode="drop")
    rows = jax.tree.map(lambda leaf: _moved(leaf, source).reshape(count, room, *leaf.shape[1:]), x)
    done = run(rows, mine.sum(axis=0, dtype=jnp.int32)).reshape(count * room, -1)
    factor = jnp.where(rank < room, weight.reshape(-1), 0.0)
    # Else XLA computes them anew, from the drawing on, for each of the D numbers that they scale.
    place, factor = jax.lax.optimization_barrier((jnp.minimum(place, count * room - 1), factor))
    found = _gathered(done, place)
    found = (found.astype(jnp.float32) * factor[:, None]).reshape(*expert.shape, -1)
    return found.sum(axis=1).astype(done.dtype)


def _moved(rows: Shaped[Array, "n *D"], at: Int[Array, " m"]) -> Shaped[Array, "m *D"]:
    """Rows as they are. Bytes move as words: XLA loads four elements at once, whatever they are."""
    if rows.dtype.itemsize > 1:
        return _gathered(rows, at)
    return unpack(_gathered(pack(rows), at), rows.dtype)


def _gathered(rows: Shaped[Array, "n *D"], at: Int[Array, " m"]) -> Shaped[Array, "m *D"]:
    return rows.at[at].get(mode="promise_in_bounds")
