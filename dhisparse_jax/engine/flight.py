"""Dispatches that are on their way: the device works on them while the host reads those before."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.events import Acceptance, StepMetrics, step_acceptance, step_metrics
from dhisparse_jax.engine.job import Job
from dhisparse_jax.engine.output import Packed, unpacked


@dataclasses.dataclass(frozen=True)
class Flight:
    """One dispatch between its launch and its landing.

    Attributes:
        output: what its steps will have done, on its way to the host.
        jobs: who took part, by row. Some may have left since. For those that ended in the dispatch
            before, which the host did not know at the launch, it has no tokens.
        begin: when it was launched, in seconds.
    """

    output: Packed
    jobs: Mapping[int, Job]
    begin: float

    def land(self) -> "Landed":
        """Wait for its end."""
        return Landed(unpacked(self.output))


@dataclasses.dataclass(frozen=True)
class LandedStep:
    """What one step did.

    Attributes:
        metrics: what it read.
        acceptance: how far the draft was followed.
        tokens: what each row emitted, at least one token; the others are left out.
    """

    metrics: StepMetrics
    acceptance: Acceptance
    tokens: dict[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Landed:
    """One dispatch after its end.

    Attributes:
        output: a `StepOutput` with NumPy arrays, whose first axis is the step.
    """

    output: Any

    @property
    def counts(self) -> dict[int, int]:
        """Tokens of every row that emitted some."""
        counts = self.output.count.sum(axis=0).tolist()
        return {row: count for row, count in enumerate(counts) if count}

    @property
    def verified(self) -> int:
        """Queries verified per step and request, rounded; 0 if nobody took part."""
        queries = self.output.verified
        return round(float(queries.sum()) / max(np.count_nonzero(queries), 1))

    def steps(self, cfg: HierarchyConfig, proposals: int) -> Iterator[LandedStep]:
        """All steps in order, up to the end of the last request.

        Args:
            cfg: sizes of the hierarchy.
            proposals: tokens that the draft proposes.
        """
        for step in range(int(self.output.count.any(axis=1).sum())):
            now = jax.tree.map(lambda leaf, step=step: leaf[step], self.output)
            tokens = zip(now.tokens.tolist(), now.count.tolist(), strict=True)
            yield LandedStep(
                metrics=step_metrics(cfg, now.records),
                acceptance=step_acceptance(now.count, now.verified, proposals),
                tokens={row: tuple(new[:n]) for row, (new, n) in enumerate(tokens) if n},
            )
