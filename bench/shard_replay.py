"""What a share of a model is made to follow, and the weights beside it."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT

CERTAIN = 1e9
"""What is added to the logit of the token that the target must choose."""


@pytree
class Replay:
    """What is replayed.

    Attributes:
        on: whether anything is.
        selections: int32 ascending; row i of a trace is what position `history + i` selects.
        trace: which trace each selection and request follows: all selections of pool 0, then those
            of pool 1.
        history: positions before the first row of the traces.
        text: tokens that the target chooses at each query.
    """

    on: Bool[Array, ""]
    selections: Int[Array, "traces rows K"]
    trace: Int[Array, "selections R"]
    history: Int[Array, ""]
    text: Int[Array, "R T"]


@pytree
class ShardParams:
    """Weights, and what is replayed."""

    weights: Any
    replay: Replay


def first_selections(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Number of the first selection of each pool; of the pools 1, 1, 5: 0, 1, 2."""
    return (0, *itertools.accumulate(counts))[:-1]


def replayed(replay: Replay, number: int, positions: Int[Array, "R T"]) -> Int[Array, "R T K"]:
    """What the queries at these positions select; NO_SLOT where nothing is replayed."""
    row = jnp.clip(positions - replay.history, 0, replay.selections.shape[1] - 1)
    chosen = replay.selections[replay.trace[number][:, None], row]
    return jnp.where(replay.on, chosen, NO_SLOT)


def as_that_of(
    replay: Replay, counts: tuple[int, ...], stands: int, pool: Int[Array, ""]
) -> Replay:
    """The traces of a pool in the place of those of one with as many selections."""
    first = first_selections(counts)
    begin, count = first[stands], counts[stands]
    own = jnp.asarray(first, jnp.int32)[pool] + jnp.arange(count, dtype=jnp.int32)
    trace = replay.trace.at[begin : begin + count].set(replay.trace[own])
    return dataclasses.replace(replay, trace=trace)


def with_text(replay: Replay, logits: Float[Array, "R T V"]) -> Float[Array, "R T V"]:
    """Logits of which the replayed token's is by far the best."""
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    chosen = replay.on & (token == replay.text[..., None])
    return logits + jnp.where(chosen, CERTAIN, 0.0)
