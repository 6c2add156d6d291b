"""Time keeping and progress lines of a run."""

import logging
import time
from dataclasses import dataclass, field

from dhisparse_jax.models.train.config import Phase, TrainConfig
from dhisparse_jax.models.train.step import Metrics

log = logging.getLogger(__name__)


@dataclass
class Clock:
    """Lays the phases out over the time that is left.

    Attributes:
        budget: Seconds from `started` in which everything must be done.
        started: When the run started, in the seconds of `time.monotonic`.
    """

    budget: float
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started

    def seconds_for(self, index: int, config: TrainConfig) -> float:
        """Time of phase `index`: its share of what is left for it and the ones after it."""
        left = max(0.0, self.budget - config.reserve_seconds - self.elapsed)
        shares = [phase.share for phase in config.phases[index:]]
        return left * shares[0] / sum(shares)


@dataclass
class PhaseProgress:
    """How far a phase is: by time, or by steps if the run is limited to some.

    The learning rate follows `fraction`, so a phase ends with its rates where they should be,
    however fast the steps are.
    """

    phase: Phase
    seconds: float
    max_steps: int | None
    report_seconds: float
    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    _seen: list[Metrics] = field(default_factory=list)
    _reported: float = field(default_factory=time.monotonic)
    _reported_steps: int = 0

    @property
    def fraction(self) -> float:
        """Part of the phase that is done; at least 1 when it is over."""
        if self.max_steps is not None:
            return self.steps / self.max_steps
        return (time.monotonic() - self.started) / self.seconds if self.seconds > 0 else 1.0

    @property
    def tokens(self) -> int:
        """Tokens trained on in this phase."""
        return self.steps * self.phase.batch * self.phase.context

    def observe(self, metrics: Metrics) -> dict[str, float] | None:
        """Takes the metrics of a finished step; now and then returns a point for the curve."""
        self._seen.append(metrics)
        now = time.monotonic()
        if now - self._reported < self.report_seconds:
            return None
        speed = (self.steps - self._reported_steps) / max(now - self._reported, 1e-9)
        count = len(self._seen)
        means = {
            name: sum(float(getattr(step, name)) for step in self._seen) / count
            for name in Metrics._fields
        }
        self._seen.clear()
        self._reported, self._reported_steps = now, self.steps
        return means | {"tokens_per_second": speed * self.phase.batch * self.phase.context}


def report(progress: PhaseProgress, point: dict[str, float], left: float) -> None:
    """One line about how training goes; `left` is the time to the end of the run, in seconds."""
    log.info(
        "%-10s %3.0f %%  step %5d  %.4f bits/byte  index %.4f  experts %.2f  %.0f tokens/s  "
        "eta %.0f s",
        progress.phase.name,
        100 * min(progress.fraction, 1.0),
        progress.steps,
        point["bits_per_byte"],
        point["index_divergence"],
        point["load_imbalance"],
        point["tokens_per_second"],
        left,
    )
