"""Prompts piece by piece: as far as one goes by itself."""

from collections import deque
from typing import Any, NamedTuple

import jax

from dhisparse_jax.engine.events import Event
from dhisparse_jax.engine.job import Job, Part
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.seat import Chunk


class Begun(NamedTuple):
    """A request whose prompt is read, and which decodes now.

    Attributes:
        first: int32 array of its first token; None on a device of another process.
    """

    first: Any


def read_piece(job: Job, machine: Machine, row: int, events: deque[Event | Part]) -> Begun | None:
    """One piece of a prompt, or as far as it goes without others; or what is left of coming back.

    Args:
        job: in a row.
        machine: whose row it is.
        row: the row there.
        events: where its events are put.
    """
    if job.prefill is None:
        jax.block_until_ready(machine.state.length)
        return None
    while job.chunk is None:
        try:
            item = next(job.prefill)
        except StopIteration as end:
            first = machine.first_token(end.value, job.request, job.draw)
            job.prefill = None
            machine.write(row, job.request, job.draw, first)
            return Begun(first)
        if isinstance(item, Chunk):
            job.chunk = item
            continue
        events.append(item)
        if not machine.together:
            break
    return None
