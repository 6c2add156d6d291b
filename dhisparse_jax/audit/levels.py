"""E0 to E3 in order, on one model, one policy and one draft."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dhisparse_jax.audit.findings import PROMISES, Difference, Level
from dhisparse_jax.audit.greedy import compare_tokens, count_proposals, write
from dhisparse_jax.audit.lockstep import Pair, Text, lockstep
from dhisparse_jax.audit.observe import Subject
from dhisparse_jax.audit.outputs import compare_outputs
from dhisparse_jax.audit.records import Sizes, compare_records
from dhisparse_jax.audit.sampled import Context, asking, draw_tokens, enumerate_rule
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.engine.request import Request

DENSE_TOLERANCE = 1e-3
"""Of the logits of decode steps against those of a prefill of the whole text, relative to the
largest: float32 rounds otherwise in other shapes."""

EXACT = "float32"
"""History in which prefill and decode agree but for the rounding of sums, and E2 is promised."""

FAR = "logits are not those of a prefill of the whole text"
"""What is said where they differ by more."""

LARGEST = "largest difference from a prefill of the whole text"
"""What the largest of these differences is called."""


@dataclasses.dataclass(frozen=True)
class Subjects:
    """Engines of one model and its weights, idle, with one step per dispatch.

    Attributes:
        plain: `resident`, without a draft.
        audited: the policy, with the draft that was asked for, all of whose proposals are verified.
        resident: `resident`, with the sizes of `audited` otherwise.
        drafted: for E2 and E3, the engine of `audited`, or where that has no draft one like it with
            a draft that knows the texts.
    """

    plain: Engine
    audited: Subject
    resident: Subject
    drafted: Engine


class Levels(NamedTuple):
    """What is found of each promise.

    Attributes:
        e0: what is found of E0.
        e1: what is found of E1.
        e2: what is found of E2.
        e3: what is found of E3.
    """

    e0: Level
    e1: Level
    e2: Level
    e3: Level

    @classmethod
    def empty(cls) -> "Levels":
        """Nothing was compared yet."""
        return cls(*(Level(name) for name in PROMISES))


Check = Callable[[], None]
"""Adds to what is found of one promise."""


def written_texts(plain: Engine, requests: Sequence[Request], check: Check) -> list[Text]:
    """What the model goes on with, greedily: the texts that are compared."""
    tokens = write(plain, requests, check=check).tokens
    return [
        Text(request.name, (*request.prompt, *new), len(request.prompt))
        for request, new in zip(requests, tokens, strict=True)
    ]


def audit(
    subjects: Subjects,
    requests: Sequence[Request],
    texts: Sequence[Text],
    levels: Levels,
    check: Check,
) -> None:
    """Compare everything.

    Args:
        subjects: engines; idle again afterwards.
        requests: greedy ones.
        texts: what `written_texts` gave for them.
        levels: take in what is found, as it is found.
        check: called between steps; may raise.
    """
    engine = subjects.audited.engine
    e0, e1, _, e3 = levels
    greedy(subjects, requests, texts, levels, check)
    rows, sizes = engine.cfg.requests, Sizes(engine.cfg, subjects.resident.engine.cfg)
    for start in range(0, len(texts), rows):
        part = texts[start : start + rows]
        dense = [prefilled(subjects.resident, text) for text in part]
        for pair in lockstep(subjects.audited, subjects.resident, part):
            compare_records(pair, sizes, e0)
            compare_dense(pair, dense, e0, judged=_exact(engine))
            compare_outputs(pair, e1)
            if start == 0 and pair.number == 1:
                sampled(subjects, pair, part, dense, e3)
            check()


def sampled(
    subjects: Subjects, pair: Pair, texts: Sequence[Text], dense: Sequence[np.ndarray], level: Level
) -> None:
    """E3, after the prompts of the texts, of which `pair` is the first step."""
    drafted = subjects.drafted
    if drafted is subjects.audited.engine:
        context = first_context(pair, texts)
    else:
        context = known_context(texts, dense, drafted.cfg.queries)
    ask = asking(drafted, drafted.draft_state, context)
    enumerate_rule(ask, context, level)
    draw_tokens(ask, context, level)


def greedy(
    subjects: Subjects,
    requests: Sequence[Request],
    texts: Sequence[Text],
    levels: Levels,
    check: Check,
) -> None:
    """E2; of E0, what must hold between steps of an engine; of E1, tokens without a draft."""
    e0, e1, e2, _ = levels
    plain = [list(text.tokens[text.prompt :]) for text in texts]
    written = write(subjects.audited.engine, requests, e0, check)
    e0.counts["rows fetched by the engine"] += written.fetched
    if subjects.drafted is not subjects.audited.engine:
        compare_tokens(requests, plain, written, e1, "under resident")
        if _exact(subjects.drafted):
            written = write(subjects.drafted, requests, check=check)
    if _exact(subjects.drafted):
        compare_tokens(requests, plain, written, e2, "without a draft")
        count_proposals(written, e2)
    else:
        e2.untried = f"promised for a history in {EXACT}"


def _exact(engine: Engine) -> bool:
    geometry = engine.model.geometry
    return geometry.row.name == geometry.index_format == EXACT


def prefilled(subject: Subject, text: Text) -> np.ndarray:
    """Logits [S, V] of a whole text by prefill alone, which knows nothing of the hierarchy."""
    subject.engine.sharing.forget()
    pieces = forced_logits(subject.engine, text.tokens, len(text.tokens))
    return np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])


def compare_dense(pair: Pair, dense: Sequence[np.ndarray], level: Level, *, judged: bool) -> None:
    """Compare the logits of a step with those of a prefill.

    Args:
        pair: the step.
        dense: logits of the whole text, by row.
        level: takes in what is found.
        judged: whether too large a difference is one; else it is only measured.
    """
    found: list[Difference] = []
    for row, wanted in enumerate(dense):
        start, count = int(pair.start[row]), int(pair.accepted[row])
        if count == 0:
            continue
        own = wanted[start : start + count].astype(np.float64)
        off = np.abs(pair.audited.logits[row, :count] - own).max(axis=-1)
        off /= max(1.0, float(np.abs(wanted).max()))
        level.counts["positions compared with a prefill"] += count
        level.figures[LARGEST] = max(level.figures.get(LARGEST, 0.0), float(off.max()))
        far = np.flatnonzero(~(off <= DENSE_TOLERANCE))
        if judged and len(far):
            position, detail = start + int(far[0]), f"by {off[far[0]]:.3g} of the largest"
            found.append(
                Difference(
                    FAR,
                    request=pair.names[row],
                    step=pair.number,
                    position=position,
                    detail=detail,
                )
            )
    level.add(found)


def first_context(pair: Pair, texts: Sequence[Text]) -> Context:
    """Where the draft stands before the first step: only prompts are read."""
    anchor = np.zeros_like(pair.start)
    anchor[: len(texts)] = [text.tokens[text.prompt] for text in texts]
    return Context(pair.names, anchor, pair.start, pair.resident.logits)


def known_context(texts: Sequence[Text], dense: Sequence[np.ndarray], queries: int) -> Context:
    """The same, of so many queries, for a draft that reads nothing.

    Args:
        texts: what the draft knows.
        dense: logits of the whole text, by row; the last ones again where a text is too short.
        queries: of a step.
    """
    pieces = [
        every[np.minimum(text.prompt + np.arange(queries), len(every) - 1)]
        for text, every in zip(texts, dense, strict=True)
    ]
    return Context(
        names=tuple(text.name for text in texts),
        anchor=np.array([text.tokens[text.prompt] for text in texts], np.int32),
        length=np.array([text.prompt for text in texts], np.int32),
        logits=np.stack(pieces),
    )
