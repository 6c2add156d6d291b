"""Where a machine is, and what it leaves to those that run several together."""

import dataclasses
from collections.abc import Generator
from typing import Any

import jax

from dhisparse_jax.engine.compiled import Compiled, Hidden
from dhisparse_jax.engine.events import Event


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where a machine is.

    Attributes:
        device: whose it is; None: the first one.
        programs: those of another machine that is like it; None: it makes its own.
        beside: machines of this process, this one included: they share host memory.
    """

    device: jax.Device | None = None
    programs: Compiled | None = None
    beside: int = 1


ALONE = Seat()
"""The first device, with programs of its own."""


@dataclasses.dataclass
class Chunk:
    """A piece of a prompt in one pool that somebody else runs, together with those of others.

    Attributes:
        pool: which pool.
        hidden: `Hidden` of the prompt; afterwards, what the piece made of it. None on a device of
            another process.
        prompt: `Prompt` in this pool, likewise.
        start: its first row in `hidden.now`.
    """

    pool: int
    hidden: Any
    prompt: Any
    start: int


Pieces = Generator[Event | Chunk, None, Hidden]
"""A prefill, piece by piece."""
