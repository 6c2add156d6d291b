"""What a fit leaves behind: the indexers, the state to go on from, and the record."""

import dataclasses
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import restore_weights, save_json, save_weights
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.llama.indexers import save_indexers
from dhisparse_jax.models.params import Flat
from dhisparse_jax.models.train.record import PACKAGES
from dhisparse_jax.models.train_indexer.config import FitConfig
from dhisparse_jax.models.train_indexer.step import FitState

INDEXERS = "indexers"
"""The folder with what was fitted, in the folder of a run."""

_RECORD = "run.json"


@dataclass
class FitRecord:
    """Everything that is needed to judge or repeat a fit; `run.json` holds it.

    Attributes:
        config: Settings, sizes of the indexers included.
        model: File name of the frozen model.
        digest: SHA-256 of the sources of the texts.
        device: Kind of the device.
        versions: Of Python and the packages.
        parameters: Weights of all indexers.
        steps: Updates of each indexer so far.
        curve: Divergence of each group, means over the steps between two saves.
        left_out: How each group does on a left-out text.
        seconds: Time spent so far, of all runs that went on from one another.
        saves: How often the state was saved; it lies in two folders by turns.
    """

    config: dict[str, Any]
    model: str
    digest: str
    device: str
    versions: dict[str, str]
    parameters: int = 0
    steps: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    saves: int = 0

    @classmethod
    def start(cls, config: FitConfig, model: str, digest: str) -> "FitRecord":
        """The record of a fit that has not begun yet."""
        versions = {name: version(name) for name in PACKAGES}
        return cls(
            config=dataclasses.asdict(config),
            model=model,
            digest=digest,
            device=jax.devices()[0].device_kind,
            versions={"python": platform.python_version(), **versions},
        )


def save_run(out: Path, config: FitConfig, states: Sequence[FitState], record: FitRecord) -> None:
    """Write the indexers, the state and `run.json` under `out`.

    The record is written last and says where its state lies, so that a run which is killed here
    goes on from the state before.
    """
    params = {"groups": {group: state.params for group, state in enumerate(states)}}
    save_indexers(out / INDEXERS, config.fitted, params)
    record.saves += 1
    save_weights(_state_folder(out, record.saves), _flat(states))
    save_json(out / _RECORD, dataclasses.asdict(record))


def resume_run(
    out: Path, record: FitRecord, fresh: Sequence[FitState]
) -> tuple[list[FitState], FitRecord]:
    """States and record of the run that `out` holds, or the fresh ones where it holds none.

    Raises:
        UserError: `out` holds a run with other settings, of another model, or on other texts.
    """
    if not (out / _RECORD).is_file():
        return list(fresh), record
    old = read_json(out / _RECORD)
    for name in ("config", "model", "digest"):
        if old.get(name) != json.loads(json.dumps(getattr(record, name))):  # lists for tuples
            raise UserError(f"{out} holds a run with another {name}; choose another folder")
    flat = restore_weights(_state_folder(out, old["saves"]), _flat(fresh))
    leaves = [jnp.asarray(flat[name], leaf.dtype) for name, leaf in _flat(fresh).items()]
    states = jax.tree.unflatten(jax.tree.structure(list(fresh)), leaves)
    kept = ("steps", "curve", "left_out", "seconds", "saves")
    return states, dataclasses.replace(record, **{name: old[name] for name in kept})


def _state_folder(out: Path, saves: int) -> Path:
    return out / f"state.{saves % 2}"


def _flat(states: Sequence[FitState]) -> Flat:
    """All arrays by their number in the tree."""
    return {f"{at:04d}": leaf for at, leaf in enumerate(jax.tree.leaves(list(states)))}
