"""Dispatches that are on their way: the device works on them while the host reads those before."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.events import Acceptance, StepMetrics, step_acceptance, step_metrics
from dhisparse_jax.engine.job import Job
from dhisparse_jax.engine.output import Packed, unpacked
from pallas_kernels.plan.types import PlanCounts


@dataclasses.dataclass(frozen=True)
class Flight:
    """One dispatch between its launch and its landing.

    Attributes:
        output: what its steps will have done, on its way to the host.
        jobs: who took part, by row; the rows of a device follow those of the one before. Some may
            have left since. For those that ended in the dispatch before, which the host did not
            know at the launch, it has no tokens.
        begin: when it was launched, in seconds.
        devices: how many it runs on.
    """

    output: Packed
    jobs: Mapping[int, Job]
    begin: float
    devices: int = 1

    def land(self) -> "Landed":
        """Wait for its end."""
        output = unpacked(self.output, self.devices)
        return Landed(output, _tokens(output))


@dataclasses.dataclass(frozen=True)
class Landed:
    """One dispatch after its end.

    Attributes:
        output: a `StepOutput` with NumPy arrays, whose first axis is the step.
        tokens: what each row emitted in all steps, at least one token; the others are left out.
    """

    output: Any
    tokens: Mapping[int, tuple[int, ...]]

    @property
    def verified(self) -> int:
        """Queries verified per step and request, rounded; 0 if nobody took part."""
        queries = self.output.verified
        return round(float(queries.sum()) / max(np.count_nonzero(queries), 1))

    def steps(
        self, cfg: HierarchyConfig, proposals: int
    ) -> Iterator[tuple[StepMetrics, Acceptance]]:
        """What each step read and how far the draft was followed, up to the last request's end.

        Args:
            cfg: sizes of the hierarchy.
            proposals: tokens that the draft proposes.
        """
        output = self.output
        for step in range(int(output.count.any(axis=1).sum())):
            records = PlanCounts(*(counts[step] for counts in output.records))
            count, verified = output.count[step], output.verified[step]
            yield step_metrics(cfg, records), step_acceptance(count, verified, proposals)


def _tokens(output: Any) -> dict[int, tuple[int, ...]]:  # noqa: ANN401  # as `Landed.output`
    """See `Landed.tokens`."""
    count, tokens = output.count, output.tokens
    emitted = np.arange(tokens.shape[2]) < count[..., None]
    every = tokens.swapaxes(0, 1)[emitted.swapaxes(0, 1)].tolist()  # row by row, in order
    spans = enumerate(itertools.pairwise((0, *np.cumsum(count.sum(axis=0)).tolist())))
    return {row: tuple(every[start:end]) for row, (start, end) in spans if start < end}
