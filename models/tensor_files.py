"""Safetensors of a checkpoint directory: finding, checking and reading them.

Knows nothing about what the tensors mean; the caller says which names and shapes it expects. The
files are read here and not by the safetensors package, whose NumPy reader knows no 8-bit floats,
and which maps whole files into memory: here a read takes the memory of what it reads.
Source of the format: the safetensors README, "Format".
"""

import json
import math
import operator
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.hf_config import read_json
from dhisparse_jax.models.text import few

Shape = tuple[int, ...]

FLOATS = frozenset({"F32", "BF16", "F16"})
INTEGERS = frozenset({"I32", "I64"})
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I8": np.int8,
        "U8": np.uint8,
        "I32": np.int32,
        "I64": np.int64,
    }.items()
}
"""By their name in a file; tensors of other types can be listed but not read."""

_NO_NUMBERS = {
    np.dtype(np.float16): 0x7C00,
    np.dtype(ml_dtypes.bfloat16): 0x7F80,
    np.dtype(ml_dtypes.float8_e4m3fn): 0x7F,
}
"""Bits of the least positive infinity or NaN."""

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 * 2**20


class Header(NamedTuple):
    """What a file says about a tensor before it is read.

    Attributes:
        name: of the tensor, as the file has it.
        file: where it is.
        shape: of the tensor.
        dtype: as the file names it.
        start: byte of the file at which its values begin.
    """

    name: str
    file: Path
    shape: Shape
    dtype: str
    start: int


def read_headers(directory: Path) -> dict[str, Header]:
    """Every tensor of a checkpoint directory, by name.

    Raises:
        UserError: Missing or damaged files, or two with the same tensor.
    """
    headers: dict[str, Header] = {}
    for path, promised in _tensor_files(directory).items():
        found = _read_file_headers(path)
        absent = sorted(promised - found.keys())
        if absent:
            raise UserError(f"{path} lacks {few(absent)}, which the index says it holds")
        twice = sorted(headers.keys() & found.keys())
        if twice:
            raise UserError(f"{twice[0]} is in {headers[twice[0]].file} and in {path}")
        headers |= found
    return headers


def renamed(headers: Mapping[str, Header], canonical: Callable[[str], str]) -> dict[str, Header]:
    """Headers by canonical name.

    Raises:
        UserError: Two names in the files mean the same tensor.
    """
    found: dict[str, Header] = {}
    for given, header in headers.items():
        name = canonical(given)
        if name in found:
            raise UserError(f"{header.file}: {given} is the same tensor as {found[name].name}")
        found[name] = header
    return found


def check_headers(
    expected: Mapping[str, Shape], found: Mapping[str, Header], dtypes: Collection[str] = FLOATS
) -> None:
    """Names, shapes and types are those expected.

    Raises:
        UserError: Tensors are missing, left over, wrongly shaped, or of an unsupported type.
    """
    check_names(expected, found)
    for name, shape in expected.items():
        check_header(found[name], shape, dtypes)


def check_names(expected: Mapping[str, Shape], found: Mapping[str, Header]) -> None:
    """Raises UserError where tensors are missing or left over."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        where = sorted({str(header.file.parent) for header in found.values()})
        place = f"in {where[0]}" if where else "of the model"
        raise UserError(f"the checkpoint lacks {len(missing)} tensors {place}: {few(shapes)}")
    if extra:
        listed = [f"{found[name].name} in {found[name].file.name}" for name in extra]
        raise UserError(f"the checkpoint has {len(extra)} tensors too many: {few(listed)}")


def check_header(header: Header, shape: Shape, dtypes: Collection[str] = FLOATS) -> None:
    """Raises UserError where a tensor has another shape or none of these types."""
    what = f"{header.file}: {header.name} is"
    if header.shape != shape:
        raise UserError(f"{what} {list(header.shape)}, expected {list(shape)}")
    if header.dtype not in dtypes:
        raise UserError(f"{what} {header.dtype}, not one of {', '.join(sorted(dtypes))}")


def read_rows(header: Header, rows: slice = slice(None)) -> np.ndarray:
    """A tensor, or a range of its rows; nothing else of the file is read.

    Raises:
        UserError: The file cannot be read, ends too early, or has a NaN or an infinity there.
    """
    dtype = DTYPES[header.dtype]
    shape, start = header.shape, header.start
    if rows != slice(None):
        first, last, _ = rows.indices(shape[0])
        shape = (last - first, *shape[1:])
        start += first * math.prod(shape[1:]) * dtype.itemsize
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.fromfile(header.file, np.uint8, size, offset=start)
    except OSError as error:
        raise UserError(f"cannot read {header.name} from {header.file}: {error}") from error
    if raw.size != size:
        raise UserError(f"{header.file} ends inside {header.name}: the file is cut off")
    values = raw.view(dtype).reshape(shape)
    if _has_no_number(values):
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values.astype(np.float32)))[0])
        first = rows.indices(header.shape[0])[0] if rows != slice(None) else 0
        where = [at[0] + first, *at[1:]] if at else []
        raise UserError(f"{header.file}: {header.name} is {values[at]} at {where}")
    return values


def _has_no_number(values: np.ndarray) -> bool:
    """Whether there is a NaN or an infinity among floats; several times as fast as they are read.

    What NumPy has no quick loops for is compared by its bits: those of the largest float of either
    sign are the largest whole number, signed for the one and unsigned for the other.
    """
    limit = _NO_NUMBERS.get(values.dtype)
    if not values.size:
        return False
    if limit is None:
        return values.dtype == np.float32 and not np.isfinite(values).all()
    size = values.dtype.itemsize
    sign = 1 << (8 * size - 1)
    return bool(
        values.view(f"i{size}").max() >= limit or values.view(f"u{size}").max() >= sign + limit
    )


def _tensor_files(directory: Path) -> dict[Path, set[str]]:
    """The single file, or those that the index lists, with the tensors it says they hold."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        raise UserError(f"{directory} holds neither {single.name} nor {index.name}")
    shards = read_json(index).get("weight_map")
    named = isinstance(shards, dict) and all(isinstance(s, str) for s in shards.values())
    if not named or not shards:
        raise UserError(f"{index} has no weight_map of tensor names to file names")
    files: dict[Path, set[str]] = {}
    for name, shard in shards.items():
        files.setdefault(directory / Path(shard).name, set()).add(name)
    for path, names in files.items():
        if not path.is_file():
            holds = few(sorted(names), 1)
            raise UserError(f"{path}: no such file, but {index.name} says that it holds {holds}")
    return dict(sorted(files.items()))


def _read_file_headers(path: Path) -> dict[str, Header]:
    """The headers of one file, checked against its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if start > min(size, _MOST_HEADER_BYTES):
                raise UserError(
                    f"{path} is damaged or not a safetensors file: its header would end at byte "
                    f"{start:,}, and it has {size:,}"
                )
            entries = json.loads(file.read(start - _LENGTH_BYTES))
        entries.pop("__metadata__", None)
        return {name: _header(path, name, entry, start) for name, entry in entries.items()}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:  # not JSON, or not of tensors
        raise UserError(f"{path} is damaged or not a safetensors file: {error!r}") from error


def _header(path: Path, name: str, entry: Mapping[str, Any], data: int) -> Header:
    """One entry of a header, if it can be true; the values begin at byte `data` of the file."""
    shape, dtype = tuple(map(operator.index, entry["shape"])), entry["dtype"]
    first, end = map(operator.index, entry["data_offsets"])
    known = DTYPES.get(dtype)
    if known is not None and end - first != math.prod(shape) * known.itemsize:
        raise UserError(
            f"{path} is damaged: {name} is {list(shape)} of {dtype}, but has {end - first:,} bytes"
        )
    size = path.stat().st_size
    if first < 0 or data + end > size:
        raise UserError(
            f"{path} is cut off: {name} ends at byte {data + end:,}, and the file has {size:,}"
        )
    return Header(name, path, shape, dtype, data + first)
