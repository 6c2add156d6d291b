"""What a draft's run leaves behind: the checkpoint, the state to go on from, and the record."""

import dataclasses
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import restore_weights, save_json, save_weights
from dhisparse_jax.models.draft.checkpoint import save_draft
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.params import Flat, flatten
from dhisparse_jax.models.train.corpus import Corpus
from dhisparse_jax.models.train.record import PACKAGES
from dhisparse_jax.models.train_draft.config import DraftTrainConfig
from dhisparse_jax.models.train_draft.evaluate import Accepted
from dhisparse_jax.models.train_draft.step import DraftState


@dataclass
class DraftRecord:
    """Everything that is needed to judge or repeat a run; `run.json` holds it.

    Attributes:
        config: Settings of the run, seed and sizes of the draft included.
        kind: Which draft it is.
        corpus: Sizes, hash and Python version of the text.
        device: Kind of the device that trained.
        versions: Of Python and the packages.
        parameters: Number of weights.
        continued: Sequences that the target continued.
        steps: Optimizer steps.
        blocks: Blocks that were trained on.
        curve: Training losses over time.
        evaluations: Accept lengths on left-out modules during the run.
        final: Those at the end: mean of accepted + 1, by position, and steps behind them.
        seconds: Time spent so far, of all runs that went on from one another.
        saves: How often the state was saved; it lies in two folders by turns.
    """

    config: dict[str, Any]
    kind: str
    corpus: dict[str, object]
    device: str
    versions: dict[str, str]
    parameters: int = 0
    continued: int = 0
    steps: int = 0
    blocks: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    saves: int = 0

    @classmethod
    def start(cls, config: DraftTrainConfig, corpus: Corpus) -> "DraftRecord":
        """The record of a run that has not trained yet."""
        return cls(
            config=dataclasses.asdict(config),
            kind=config.draft.kind,
            corpus=corpus.record(),
            device=jax.devices()[0].device_kind,
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
            },
        )

    def add_evaluation(self, accepted: Accepted, seconds: float) -> None:
        """Notes accept lengths; the newest are the final ones."""
        point = {"step": self.steps, "seconds": round(seconds, 2)}
        self.evaluations.append(point | {"accept_length": round(accepted.length, 4)})
        self.final = {
            "accept_length": round(accepted.length, 4),
            "accept_by_position": [round(part, 4) for part in accepted.by_position],
            "steps": accepted.steps,
        }


def save_run(out: Path, config: DraftTrainConfig, state: DraftState, record: DraftRecord) -> None:
    """Writes `checkpoint/`, the state and `run.json` under `out`.

    The record is written last and says where its state lies, so that a run which is killed here
    goes on from the state before.
    """
    save_draft(out / "checkpoint", config.draft, state.params)
    record.saves += 1
    save_weights(_state_folder(out, record.saves), _flat_state(state))
    save_json(out / "run.json", dataclasses.asdict(record))


def resume_run(out: Path, record: DraftRecord, fresh: DraftState) -> tuple[DraftState, DraftRecord]:
    """State and record of the run that `out` holds, or the fresh ones where it holds none.

    Raises:
        UserError: `out` holds a run of another draft.
    """
    if not (out / "run.json").is_file():
        return fresh, record
    old = read_json(out / "run.json")
    if old.get("kind") != record.kind:
        raise UserError(
            f"{out} holds a run of {old.get('kind')}, not of {record.kind}; choose another folder"
        )
    flat = restore_weights(_state_folder(out, old["saves"]), _flat_state(fresh))
    leaves = [jnp.asarray(flat[name], leaf.dtype) for name, leaf in _flat_state(fresh).items()]
    state = jax.tree.unflatten(jax.tree.structure(fresh), leaves)
    kept = ("continued", "steps", "blocks", "curve", "evaluations", "final", "seconds", "saves")
    return state, dataclasses.replace(record, **{name: old[name] for name in kept})


def _state_folder(out: Path, saves: int) -> Path:
    return out / f"state.{saves % 2}"


def _flat_state(state: DraftState) -> Flat:
    """Weights and moments by name, in the order of the tree."""
    leaves = jax.tree.leaves(state)
    named = {f"weight.{name}": leaf for name, leaf in flatten(state.params).items()}
    moments = leaves[len(named) :]
    return named | {f"moment.{number}": leaf for number, leaf in enumerate(moments)}
