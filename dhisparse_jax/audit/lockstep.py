"""The same texts under a policy and under `resident`, in steps that are compared with each other.

Both read known tokens, T per step, of which a step accepts from none to all. What is rejected are
random tokens under the policy and the text itself under `resident`, so that anything which a
rejected row leaves behind makes a difference.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from dhisparse_jax.audit.observe import Outcome, Subject
from dhisparse_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to be read.

    Attributes:
        name: of the request.
        tokens: all of it.
        prompt: how many of them are prefilled, less than all.
    """

    name: str
    tokens: tuple[int, ...]
    prompt: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """One step under the policy and under `resident`.

    Attributes:
        number: of the step, from 1.
        names: of the requests, by row.
        start: lengths before the step.
        accepted: how many positions it committed.
        audited: what the step under the policy did.
        resident: what the other did.
        state: the hierarchy under the policy after it, as NumPy arrays.
        reference: the hierarchy under `resident` after it.
    """

    number: int
    names: tuple[str, ...]
    start: Int[np.ndarray, " R"]
    accepted: Int[np.ndarray, " R"]
    audited: Outcome
    resident: Outcome
    state: Any
    reference: Any


def lockstep(
    audited: Subject, resident: Subject, texts: Sequence[Text], seed: int = 0
) -> Iterator[Pair]:
    """Read the texts to their ends, as many as there are rows; the rows are free afterwards.

    Args:
        audited: under the policy.
        resident: under `resident`, of the same sizes otherwise.
        texts: with room for T - 1 positions behind each.
        seed: of what is rejected.

    Raises:
        UserError: there are more texts than rows.
    """
    rows = audited.engine.cfg.requests
    if len(texts) > rows:
        raise UserError(f"{len(texts)} texts cannot be read in {rows} rows")
    both = (audited.engine, resident.engine)
    work = _read(audited, resident, texts, np.random.default_rng(seed))
    try:
        yield from audited.engine.whole.between(resident.engine.whole.between(work))
    finally:
        for engine in both:
            if engine.whole:  # else an exception may have cost the state
                for row in np.flatnonzero(jax.device_get(engine.state.active)).tolist():
                    engine.leave(row)


def _read(
    audited: Subject, resident: Subject, texts: Sequence[Text], rng: np.random.Generator
) -> Iterator[Pair]:
    """See `lockstep`."""
    both = (audited.engine, resident.engine)
    for (row, text), engine in ((pair, engine) for pair in enumerate(texts) for engine in both):
        engine.sharing.forget()  # what one knows of an earlier run, the other may not
        for _ in engine.prefill(row, row, text.tokens[: text.prompt]):
            pass
    yield from _steps(audited, resident, texts, rng)


def _steps(
    audited: Subject, resident: Subject, texts: Sequence[Text], rng: np.random.Generator
) -> Iterator[Pair]:
    cfg, number = audited.engine.cfg, 0
    start = np.zeros(cfg.requests, np.int32)
    start[: len(texts)] = [text.prompt for text in texts]
    ends = np.array([len(text.tokens) for text in texts], np.int32)
    while (left := ends - start[: len(texts)]).any():
        number += 1
        true, junk = np.zeros((2, cfg.requests, cfg.queries), np.int32)
        for row, text in enumerate(texts):
            piece = text.tokens[start[row] : start[row] + cfg.queries]
            true[row, : len(piece)] = piece
        junk = rng.integers(0, audited.engine.model.vocabulary, true.shape, np.int32)
        accepted = np.zeros(cfg.requests, np.int32)
        wanted = (number + np.arange(len(texts))) % cfg.queries + 1
        accepted[: len(texts)] = np.minimum(wanted, left)
        kept = np.arange(cfg.queries) < accepted[:, None]
        pair = Pair(
            number=number,
            names=tuple(text.name for text in texts),
            start=start.copy(),
            accepted=accepted,
            audited=audited.step(np.where(kept, true, junk), accepted),
            resident=resident.step(true, accepted),
            state=jax.device_get(audited.engine.state),
            reference=jax.device_get(resident.engine.state),
        )
        yield pair
        start += accepted
