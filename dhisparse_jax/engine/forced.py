"""Teacher forcing: logits of given tokens through the engine's own prefill and decode path.

Used to score texts and to compare with other implementations. T known tokens go through one step as
verify queries and are all accepted.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dhisparse_jax.engine.compiled import Hidden
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Event, StepDone, step_metrics
from dhisparse_jax.errors import UserError


def forced_logits(
    engine: Engine, tokens: Sequence[int], split: int
) -> Iterator[Event | Float[np.ndarray, "n V"]]:
    """Events, and the logits of every position in order, in pieces of n positions.

    Stopping the iteration early frees the row.

    Args:
        engine: with no request running; row 0 is used.
        tokens: token ids; the logits at position i are those after reading tokens 0..i.
        split: how many tokens are prefilled; the rest is decoded `queries` at a time.

    Raises:
        UserError: if the tokens do not fit, or the split does not.
    """
    capacity, count = engine.cfg.capacity, len(tokens)
    if not 1 <= split <= count:
        raise UserError(f"a split of {split} is outside 1..{count}, the number of tokens")
    if count + engine.cfg.queries - 1 > capacity:
        raise UserError(f"{count} tokens do not fit into a context of {capacity}")
    try:
        yield from engine.whole.between(_pieces(engine, tokens, split))
    finally:
        if engine.whole:  # else an exception may have cost the state
            engine.leave(0)


def _pieces(
    engine: Engine, tokens: Sequence[int], split: int
) -> Iterator[Event | Float[np.ndarray, "n V"]]:
    """See `forced_logits`."""
    entry = engine.sharing.enter(0, (), len(tokens))
    prefill = engine.prefill(0, 0, tokens[:split], entry)  # of one device, so without chunks
    hidden = yield from cast("Generator[Event, None, Hidden]", prefill)
    yield from _prompt_logits(engine, hidden.now, split)
    yield from _decode(engine, tokens, split)


def _prompt_logits(
    engine: Engine, hidden: Float[Array, "P D"], split: int
) -> Iterator[Float[np.ndarray, "n V"]]:
    chunk = engine.compiled.chunk
    for start in range(0, split, chunk):
        piece = engine.compiled.logits(engine.params, hidden, jnp.int32(start))
        yield np.asarray(piece)[: min(chunk, split - start)]


def _decode(
    engine: Engine, tokens: Sequence[int], split: int
) -> Iterator[Event | Float[np.ndarray, "n V"]]:
    width = engine.cfg.queries
    block = np.zeros((engine.cfg.requests, width), np.int32)
    for number, start in enumerate(range(split, len(tokens), width), start=1):
        piece = tokens[start : start + width]
        block[0, : len(piece)] = piece
        logits, _, state = engine.compiled.forward(engine.params, engine.state, jnp.asarray(block))
        accepted = jnp.full(engine.cfg.requests, len(piece), jnp.int32)
        engine.state = engine.compiled.finish(state, accepted)
        yield np.asarray(logits[0])[: len(piece)]
        counts = jax.device_get(engine.state.counts)
        yield StepDone(number, step_metrics(engine.cfg, counts))
