"""What the engine reports while it runs. Requests are named by their number in the run."""

import dataclasses
import itertools
from typing import Literal

import numpy as np
from jaxtyping import Int

from dhisparse_jax.config import HierarchyConfig
from pallas_kernels.plan.types import PlanCounts

FinishReason = Literal["length", "stop", "context", "cancelled"]
"""length: max_new_tokens reached; stop: a stop token; context: no position left; cancelled."""


@dataclasses.dataclass(frozen=True)
class PrefillProgress:
    """`done` of `total` pieces (one chunk in one group) of a request's prompt are prefilled.

    Attributes:
        request: its number.
        done: pieces that are prefilled.
        total: pieces of the prompt.
    """

    request: int
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """A request went on by these tokens, in all steps of a dispatch.

    Attributes:
        request: its number.
        tokens: the new tokens, in order.
    """

    request: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A request ended; its row and pages are free again.

    Attributes:
        request: its number.
        reason: why it ended.
    """

    request: int
    reason: FinishReason


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one step read, over all pools and requests. A row is one token in one layer.

    Attributes:
        selected_rows: rows in the working sets; = hit + tail + fetched.
        hit_rows: found in the hot pool.
        tail_rows: found in the tail.
        fetched_rows: read from the host, each once.
        host_bytes_read: bytes of the fetched records, padding included.
    """

    selected_rows: int = 0
    hit_rows: int = 0
    tail_rows: int = 0
    fetched_rows: int = 0
    host_bytes_read: int = 0

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        """Sum, field by field."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return StepMetrics(*(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How far the target followed the draft.

    Attributes:
        blocks: verified blocks, one per running request and step.
        verified: how many of them verified their first, second, ... proposal.
        accepted: how many of them accepted it, and so all before it.
    """

    blocks: int = 0
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Sum, place by place."""
        add = lambda mine, theirs: tuple(
            a + b for a, b in itertools.zip_longest(mine, theirs, fillvalue=0)
        )
        return Acceptance(
            blocks=self.blocks + other.blocks,
            verified=add(self.verified, other.verified),
            accepted=add(self.accepted, other.accepted),
        )

    @property
    def length(self) -> float:
        """Tokens per block: accepted proposals and one more; 0 without any block."""
        return 1.0 + sum(self.accepted) / self.blocks if self.blocks else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of all blocks that accepted their first, second, ... proposal."""
        return tuple(count / max(self.blocks, 1) for count in self.accepted)


@dataclasses.dataclass(frozen=True)
class StepDone:
    """Decode step number `step` (from 1) is done; the tokens of a dispatch follow its steps.

    Attributes:
        step: its number.
        metrics: what the hierarchy did.
        acceptance: what became of proposals.
    """

    step: int
    metrics: StepMetrics
    acceptance: Acceptance = Acceptance()


Event = PrefillProgress | NewTokens | Finished | StepDone
"""What an engine reports."""


def step_metrics(cfg: HierarchyConfig, counts: PlanCounts) -> StepMetrics:
    """Rows and bytes of one step, from its record counts per pool and request."""
    layers = cfg.geometry.layers_per_pool
    per_pool = {name: getattr(counts, name).sum(axis=1).tolist() for name in counts._fields}
    rows = lambda name: sum(n * per for n, per in zip(per_pool[name], layers, strict=True))
    record_bytes = [cfg.record_bytes(pool) for pool in range(cfg.pools)]
    fetched = zip(per_pool["fetched"], record_bytes, strict=True)
    return StepMetrics(
        selected_rows=rows("selected"),
        hit_rows=rows("hit"),
        tail_rows=rows("tail"),
        fetched_rows=rows("fetched"),
        host_bytes_read=sum(n * size for n, size in fetched),
    )


def step_acceptance(
    count: Int[np.ndarray, " R"], verified: Int[np.ndarray, " R"], proposals: int
) -> Acceptance:
    """Acceptance of one step, from the emitted tokens and the verified queries of every request."""
    more_than = lambda numbers: tuple(int((numbers > i + 1).sum()) for i in range(proposals))
    return Acceptance(
        blocks=int((count > 0).sum()), verified=more_than(verified), accepted=more_than(count)
    )
