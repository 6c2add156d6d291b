"""What leaves a row and comes back: a request in its host pages, or all of it as a session.

A request in its host pages has left nothing behind: every committed record and index key is in
them. Beside them it takes along its row of the draft's ring, which is small. Coming back, it reads
index keys, and the records that fit into its tail and hot slots; nothing is written to the host.
A session is in arrays of its own, for other engines and for the disk, or because the pages are
needed: to make it and to take it in moves all of the history over the link.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.session import Session
from dhisparse_jax.engine.sharing import Holding
from dhisparse_jax.prefill import Prompt, empty_prompt
from pallas_kernels.common.rows import WORD_BYTES


@dataclasses.dataclass(frozen=True)
class Paged:
    """A request outside of its row, in its host pages.

    Attributes:
        holding: the pages.
        ring: what the drafter kept of its row, in host arrays.
    """

    holding: Holding
    ring: Any


def session_bytes(machine: Machine, positions: int) -> int:
    """Bytes of the arrays of a session with so many committed positions."""
    cfg = machine.cfg
    words = sum(cfg.record_words(pool) for pool in range(cfg.pools))
    keys = cfg.pools * cfg.geometry.key_bytes
    return positions * (words * WORD_BYTES + keys) + machine.sizes.draft_bytes // cfg.requests


def page_out(machine: Machine, row: int) -> Paged:
    """Take the request of a row out of it; its row is free, its host pages are not."""
    ring = _ring(machine, row)
    return Paged(machine.vacate(row), ring)


def page_in(
    machine: Machine, row: int, paged: Paged, request: Request, draw: int, produced: Sequence[int]
) -> None:
    """Put a request back into a free row, which goes on as if it had never stopped.

    Args:
        machine: where to.
        row: any free row.
        paged: what `page_out` gave.
        request: what was asked for.
        draw: number that its random draws depend on.
        produced: tokens emitted so far.
    """
    text = (*request.prompt, *produced)
    machine.join(row, len(text) - 1, machine.sharing.put_back(row, paged.holding))
    for pool in range(machine.cfg.pools):
        machine.readmit(row, pool)
    machine.draft_state = machine.compiled.set_draft_row(
        machine.draft_state, jnp.int32(row), paged.ring
    )
    machine.write(row, request, draw, jnp.asarray(text[-1:], jnp.int32))


def capture(
    machine: Machine, place: int | Paged, request: Request, draw: int, produced: Sequence[int]
) -> Session:
    """Copy everything that a request needs to go on; it stays where it is.

    Args:
        machine: of which.
        place: its row, or what `page_out` gave.
        request: what was asked for.
        draw: number that its random draws depend on.
        produced: tokens emitted so far.

    Raises:
        UserError: its history is more than can be copied.
    """
    machine.cfg.geometry.check_movable("a session")
    length = len(request.prompt) + len(produced) - 1
    inside = isinstance(place, int)
    holding = machine.sharing.of(place) if inside else place.holding
    table = machine.sharing.table(holding)
    pools = [
        jax.device_get(machine.compiled.capture(machine.state, pool, table, jnp.int32(length)))
        for pool in range(machine.cfg.pools)
    ]
    ring = _ring(machine, place) if inside else place.ring
    return Session(
        model=machine.model_id,
        draft=machine.draft_id,
        request=request,
        draw=draw,
        produced=tuple(produced),
        records=tuple(pool.records[:length].copy() for pool in pools),
        keys=tuple(jax.tree.map(lambda keys: keys[:length].copy(), pool.keys) for pool in pools),
        ring=tuple(jax.tree.leaves(ring)),
        imported=holding.private,
    )


def restore(machine: Machine, row: int, session: Session) -> None:
    """Put a session into a free row, which goes on as if it had never stopped.

    Records enter where those of a prompt do. The ring of another draft, or of none, is replaced
    by one without features: proposals are poor at first, tokens the same.

    It takes nothing over from other texts, whose records may differ from its own in the last bit,
    as those of a step and of a prefill do. Others may take over what this model has computed for
    it, as from any text, but not KV from elsewhere: whatever that is, only who brought it reads it.
    """
    length = len(session.text) - 1
    positions = session.request.end(machine.cfg.capacity)
    entry = machine.sharing.enter(row, (), positions, private=session.imported)
    machine.join(row, length, entry.pages)
    for pool in range(machine.cfg.pools):
        machine.admit(row, pool, _prompt(machine, pool, session), entry)
    machine.sharing.has(row, session.text[:-1])
    if session.draft == machine.draft_id:
        ring = jax.tree.unflatten(jax.tree.structure(machine.draft_state), session.ring)
        machine.draft_state = machine.compiled.set_draft_row(
            machine.draft_state, jnp.int32(row), ring
        )
    else:
        machine.draft_nothing(row, length)
    anchor = jnp.asarray([session.text[-1]], jnp.int32)
    machine.write(row, session.request, session.draw, anchor)


def _ring(machine: Machine, row: int) -> Any:  # noqa: ANN401  # a draft state of one row
    return jax.device_get(machine.compiled.draft_row(machine.draft_state, jnp.int32(row)))


def _prompt(machine: Machine, pool: int, session: Session) -> Prompt:
    """The records and index keys of one pool, in the room that a prompt has."""
    length = len(session.text) - 1

    def padded(like: jax.ShapeDtypeStruct, rows: np.ndarray) -> jax.Array:
        whole = np.zeros(like.shape, like.dtype)
        whole[:length] = rows
        return machine.commit(whole)

    like = jax.eval_shape(lambda: empty_prompt(machine.cfg, pool, machine.compiled.chunk))
    return Prompt(
        records=padded(like.records, session.records[pool]),
        keys=jax.tree.map(padded, like.keys, session.keys[pool]),
        known=machine.commit(np.zeros((), np.int32)),
    )
