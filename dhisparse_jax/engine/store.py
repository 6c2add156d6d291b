"""Sessions in folders. A save appears whole or not at all, and the one before stays until then.

A folder holds numbered saves. A new one is written beside the last under a name that no reader
takes for a save, then renamed to its number, and only then is the last one removed: a kill at any
time leaves one whole save at least.

    folder/3/session.json   what is not an array
    folder/3/arrays/        records, index keys, draft ring
    folder/.4.part/         one that is being written, or was when its process was killed
"""

import dataclasses
import errno
import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dhisparse_jax.arrays import load_arrays, save_arrays
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.session import Session
from dhisparse_jax.errors import UserError
from dhisparse_jax.sampling import Sampling
from pallas_kernels.index_scores.types import ScaledKeys

FORMAT = 2
"""The version of what is written; another one is refused."""

_HEAD, _ARRAYS = "session.json", "arrays"
_LISTS = ("records", "keys", "ring")
_PLAIN = ("model", "draft", "draw", "produced", "imported")
_FULL = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota exceeded")


def save_session(folder: Path, session: Session) -> None:
    """Save a session into a folder, in place of the one that is there.

    Raises:
        UserError: the disk is full, or the folder cannot be written. The old save is intact.
    """
    with _writing(folder, session.nbytes):
        folder.mkdir(parents=True, exist_ok=True)
        before = _saves(folder)
        number = before[-1] + 1 if before else 1
        part = folder / f".{number}.part"
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir()
            save_arrays(part / _ARRAYS, _arrays(session))
            (part / _HEAD).write_text(json.dumps(_head(session)) + "\n", encoding="utf-8")
            part.rename(folder / str(number))
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old in before:
            shutil.rmtree(folder / str(old))


def load_session(folder: Path) -> Session:
    """The session that a folder holds.

    Raises:
        UserError: there is none, it is damaged, or it is of another version of the format.
    """
    saves = _saves(folder) if folder.is_dir() else []
    if not saves:
        raise UserError(f"{folder} holds no session")
    last = folder / str(saves[-1])
    try:
        head = json.loads((last / _HEAD).read_text(encoding="utf-8"))
        if head["format"] != FORMAT:
            raise UserError(
                f"{folder} holds a session of format {head['format']}, this is {FORMAT}; save it "
                "again with this version"
            )
        return _session(head, load_arrays(last / _ARRAYS))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the session in {folder} is damaged: {error}") from error


def _saves(folder: Path) -> list[int]:
    """Numbers of the whole saves, ascending."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _arrays(session: Session) -> dict[str, np.ndarray]:
    named = {
        f"{name}_{number}": array
        for name in _LISTS
        for number, array in enumerate(getattr(session, name))
    }
    scaled = {name: keys for name, keys in named.items() if isinstance(keys, ScaledKeys)}
    parts = {
        f"{name}_{part}": array
        for name, keys in scaled.items()
        for part, array in keys._asdict().items()
    }
    return {name: array for name, array in named.items() if name not in scaled} | parts


def _array(arrays: dict[str, Any], name: str) -> np.ndarray | ScaledKeys:
    """The reverse of `_arrays` for one name."""
    if name in arrays:
        return arrays[name]
    return ScaledKeys(*(arrays[f"{name}_{part}"] for part in ScaledKeys._fields))


def _head(session: Session) -> dict[str, Any]:
    counts = {name: len(getattr(session, name)) for name in _LISTS}
    plain = {name: getattr(session, name) for name in _PLAIN}
    return {"format": FORMAT, "request": dataclasses.asdict(session.request), **plain, **counts}


def _session(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> Session:
    asked = dict(head["request"])
    request = Request(
        name=asked["name"],
        prompt=tuple(asked["prompt"]),
        max_new_tokens=asked["max_new_tokens"],
        sampling=Sampling(**asked["sampling"]),
        stop=tuple(asked["stop"]),
    )
    lists: dict[str, tuple[Any, ...]] = {
        name: tuple(_array(arrays, f"{name}_{number}") for number in range(head[name]))
        for name in _LISTS
    }
    return Session(
        model=head["model"],
        draft=head["draft"],
        request=request,
        draw=head["draw"],
        produced=tuple(head["produced"]),
        imported=head["imported"],
        **lists,
    )


@contextmanager
def _writing(folder: Path, size: int) -> Generator[None, None, None]:
    """Say what is wrong with the disk, if it is the disk."""
    try:
        yield
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError
        text = str(error)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in text for sign in _FULL):
            free = shutil.disk_usage(folder).free
            raise UserError(
                f"the session does not fit on the disk of {folder}: it has {size} bytes, {free} "
                "are free; make room or name another folder"
            ) from error
        if isinstance(error, OSError):
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        raise
