"""Greedy tokens, through the engine as it is used: with a draft, E2; without, a part of E1."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from typing_extensions import override

from dhisparse_jax.audit.findings import Difference, Level
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Acceptance, NewTokens, StepDone
from dhisparse_jax.engine.output import Packed
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.watch import Nobody
from dhisparse_jax.hierarchy.invariants import check_invariants


@dataclasses.dataclass
class Written:
    """What a run wrote.

    Attributes:
        tokens: of each request, the prompt left out.
        steps: in which step each of them came; 0 is the end of the prompt.
        fetched: rows read from the host.
        acceptance: how far the draft was followed.
    """

    tokens: list[list[int]]
    steps: list[list[int]]
    fetched: int = 0
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)


class Invariants(Nobody):
    """A `Watcher` that checks what must hold between steps.

    Args:
        engine: what it watches, with one step per dispatch.
        level: takes in what it finds.
    """

    def __init__(self, engine: Engine, level: Level) -> None:
        self._engine, self._level, self._steps = engine, level, 0

    @override
    def stepped(self, output: Packed) -> None:
        """See `Watcher`."""
        self._steps += 1
        state = jax.device_get(self._engine.state)
        report = check_invariants(state, self._engine.cfg)
        self._level.counts["invariants"] += len(report)
        self._level.counts["steps of the engine"] += 1
        failed = [name for name, holds in report.items() if not holds]
        what = f"invariants do not hold in the engine: {', '.join(failed)}"
        self._level.add([Difference(what, step=self._steps)] if failed else [])


def write(
    engine: Engine,
    requests: Sequence[Request],
    level: Level | None = None,
    check: Callable[[], None] = lambda: None,
) -> Written:
    """Run the requests to their ends.

    Args:
        engine: idle.
        requests: what to run.
        level: if given, takes in which invariants do not hold after which step.
        check: called after every event; may raise.
    """
    engine.sharing.forget()
    before = engine.watcher
    engine.watcher = before if level is None else Invariants(engine, level)
    written = Written([[] for _ in requests], [[] for _ in requests])
    done = 0
    first = set(range(len(requests)))
    try:
        for event in engine.run(requests):
            if isinstance(event, NewTokens):
                step = 0 if event.request in first else done
                first.discard(event.request)
                written.tokens[event.request].extend(event.tokens)
                written.steps[event.request].extend([step] * len(event.tokens))
            elif isinstance(event, StepDone):
                done = event.step
                written.fetched += event.metrics.fetched_rows
                written.acceptance += event.acceptance
            check()
    finally:
        engine.watcher = before
    return written


def compare_tokens(
    requests: Sequence[Request],
    plain: Sequence[Sequence[int]],
    written: Written,
    level: Level,
    than: str,
) -> None:
    """Compare what was written with `plain`, which is what `than` names.

    Args:
        requests: greedy ones.
        plain: tokens of each under `resident`, without a draft.
        written: what is compared.
        level: takes in what is found.
        than: how `plain` was written, where that is not how the other was.
    """
    steps: dict[int, list[Difference]] = {}
    for request, without, mine, came in zip(
        requests, plain, written.tokens, written.steps, strict=True
    ):
        length = min(len(without), len(mine))
        level.counts["tokens written"] += length
        at = next((at for at in range(length) if without[at] != mine[at]), length)
        if at == len(without) == len(mine):
            continue
        name = lambda tokens, at=at: f"token {tokens[at]}" if at < len(tokens) else "no token"
        step = came[at] if at < len(came) else came[-1]
        steps.setdefault(step, []).append(
            Difference(
                f"another greedy token than {than}",
                request=request.name,
                step=step,
                position=len(request.prompt) + at,
                detail=f"{name(mine)} instead of {name(without)}",
            )
        )
    for step in sorted(steps):
        level.add(steps[step])


def count_proposals(drafted: Written, level: Level) -> None:
    """Count how far the draft was followed; where it never was asked, nothing is proved."""
    if not drafted.acceptance.blocks:
        level.untried = "no block was verified: texts end before; ask for more new tokens"
    accepted = sum(drafted.acceptance.accepted)
    level.counts["blocks verified"] += drafted.acceptance.blocks
    level.counts["proposals accepted"] += accepted
    level.counts["proposals rejected"] += sum(drafted.acceptance.verified) - accepted
