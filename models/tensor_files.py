"""Safetensors of a checkpoint directory: finding, checking and reading them.

Knows nothing about what the tensors mean; the caller says which names and shapes it expects.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.text import few

Shape = tuple[int, ...]
Read = Callable[[str], np.ndarray]
"""From the name of a tensor to its values."""

_DTYPES = {"F32", "BF16", "F16"}


class Header(NamedTuple):
    """What a file says about a tensor before it is read."""

    file: Path
    shape: Shape
    dtype: str


def read_headers(directory: Path) -> dict[str, Header]:
    """Every tensor of a checkpoint directory, by name.

    Raises:
        UserError: Missing or damaged files.
    """
    headers = {}
    for path in _tensor_files(directory):
        with _open(path) as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                header = opened.get_slice(name)
                headers[name] = Header(path, tuple(header.get_shape()), header.get_dtype())
    return headers


def check_headers(expected: Mapping[str, Shape], found: Mapping[str, Header]) -> None:
    """Names, shapes and types are those expected.

    Raises:
        UserError: Tensors are missing, left over, wrongly shaped, or of an unsupported type.
    """
    _check_names(expected, found)
    _check_shapes(expected, found)
    _check_types(found)


@contextmanager
def reading(files: Mapping[str, Path]) -> Generator[Read, None, None]:
    """Opens the files that hold the named tensors, and gives the function that reads one."""
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        yield lambda name: _read(opened[files[name]], name, files[name])


def _tensor_files(directory: Path) -> list[Path]:
    """The single file, or the files that the index of a sharded checkpoint lists."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{directory} holds neither {single.name} nor {index.name}")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise UserError(f"{index} has no weight_map of tensor names to file names")
    paths = sorted({directory / Path(shard).name for shard in shards.values()})
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(f"{len(absent)} of {len(paths)} shards are missing: {few(absent)}")
    return paths


def _open(path: Path) -> Any:  # noqa: ANN401  # safetensors has no public type for it
    """Opens a safetensors file and checks its header against its size."""
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read(opened: Any, name: str, path: Path) -> np.ndarray:  # noqa: ANN401
    """One tensor as an array."""
    try:
        return opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {name} from {path}: {error}") from error


def _check_names(expected: Mapping[str, Shape], found: Mapping[str, Header]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        raise UserError(f"the checkpoint lacks {len(missing)} tensors: {few(shapes)}")
    if extra:
        raise UserError(f"the checkpoint has {len(extra)} tensors too many: {few(extra)}")


def _check_shapes(expected: Mapping[str, Shape], found: Mapping[str, Header]) -> None:
    wrong = [
        f"{name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name].shape != shape
    ]
    if wrong:
        raise UserError(f"{len(wrong)} tensors have the wrong shape: {few(wrong)}")


def _check_types(found: Mapping[str, Header]) -> None:
    wrong = [
        f"{name} is {header.dtype}" for name, header in found.items() if header.dtype not in _DTYPES
    ]
    if wrong:
        raise UserError(
            f"{len(wrong)} tensors are not of {', '.join(sorted(_DTYPES))}: {few(wrong)}"
        )
