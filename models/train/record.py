"""What a run leaves behind: the checkpoint, float32 weights, and the record of the run."""

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.checkpoint import save_checkpoint
from dhisparse_jax.models.glm.attend import CausalBackend
from dhisparse_jax.models.params import Nested, flatten
from dhisparse_jax.models.train.config import TrainConfig
from dhisparse_jax.models.train.corpus import Corpus
from dhisparse_jax.models.train.progress import Clock, PhaseProgress

_PART_BYTES = 14 * 2**20
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass
class RunRecord:
    """Everything that is needed to judge or repeat a run; `run.json` holds it.

    Attributes:
        config: Settings of the run, seed included.
        corpus: Sizes, hash and Python version of the text.
        device: Kind of the device that trained.
        attention: Kernel of dense attention that was used.
        versions: Of Python and the packages.
        parameters: Number of weights.
        phases: Steps, tokens and seconds of each phase.
        curve: Training metrics over time.
        evaluations: Bits per byte on left-out modules after each phase.
        final: Bits per byte at the end, by mode and file, and those of xz.
        seconds: Wall time of the whole run.
    """

    config: dict[str, Any]
    corpus: dict[str, object]
    device: str
    attention: str
    versions: dict[str, str]
    parameters: int = 0
    phases: list[dict[str, Any]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    final: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def start(cls, config: TrainConfig, corpus: Corpus, backend: CausalBackend) -> "RunRecord":
        """The record of a run that has not trained yet."""
        versions = {name: version(name) for name in PACKAGES}
        return cls(
            config=dataclasses.asdict(config),
            corpus=corpus.record(),
            device=jax.devices()[0].device_kind,
            attention=backend,
            versions={"python": platform.python_version(), **versions},
        )

    def add_point(self, progress: PhaseProgress, point: dict[str, float], clock: Clock) -> None:
        """Adds a point to the training curve."""
        where = {
            "phase": progress.phase.name,
            "step": progress.steps,
            "seconds": round(clock.elapsed, 2),
        }
        self.curve.append(where | {name: round(value, 5) for name, value in point.items()})

    def end_phase(self, progress: PhaseProgress, clock: Clock) -> None:
        """Notes what a phase did."""
        self.phases.append(
            {
                "phase": progress.phase.name,
                "steps": progress.steps,
                "tokens": progress.tokens,
                "ended_at_seconds": round(clock.elapsed, 2),
            }
        )

    def add_evaluation(
        self, phase: str, mode: str, figures: dict[str, float], clock: Clock
    ) -> None:
        """Notes bits per byte on the left-out modules."""
        self.evaluations.append(
            {
                "phase": phase,
                "mode": mode,
                "seconds": round(clock.elapsed, 2),
                "bits_per_byte": round(figures["all"], 5),
            }
        )


def save_run(out: Path, config: GlmConfig, params: Nested, record: RunRecord) -> None:
    """Writes `checkpoint/`, `weights_f32.*.npz` and `run.json` under `out`."""
    record.parameters = sum(int(x.size) for x in jax.tree.leaves(params))
    save_checkpoint(out / "checkpoint", config, params)
    _save_float32(out, flatten(params))
    text = json.dumps(dataclasses.asdict(record), indent=1)
    (out / "run.json").write_text(text + "\n", encoding="utf-8")


def _save_float32(out: Path, flat: dict[str, jax.Array]) -> None:
    """The unrounded weights, in numbered parts of limited size."""
    for old in out.glob("weights_f32.*.npz"):
        old.unlink()
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in flat.items():
        host = np.asarray(array)
        if size + host.nbytes > _PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = host
        size += host.nbytes
    for number, part in enumerate(parts):
        np.savez(out / f"weights_f32.{number:03d}.npz", **part)  # type: ignore[arg-type]
