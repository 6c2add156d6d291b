"""Recordings: what every step of an engine selected, so that it can be replayed without a model.

A recording is one file. Its first line is a JSON object: `format` and `version` as below, `config`,
the fields of the `HierarchyConfig`, and `bits`, the bits of a packed position. Events follow in the
order in which they happened, each three little-endian int32 (kind, a, b):

    JOIN   a row, b positions of its prompt, or of all that it has read: the request has its pages
    ADMIT  a row, b pool: the newest positions fill the pages of this pool
    LEAVE  a row
    STEP   a number of active rows n; then n int32 rows, n int32 accepted tokens, and the selections
    END    the recording is whole

The selections of a step are packed bits, the most significant one first, filled up to a whole byte:
`bits` bits for every pool, active row, query and selected position, which are nested in this order.
They hold the position + 1, or 0 for none. With 3 bits, [[4, -1]] is 101 000 00, the byte 0xA0.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.output import Packed, unpacked
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry, RowFormat
from pallas_kernels.common.scaled_rows import ScaledRow

FORMAT, VERSION = "dhisparse-selections", 2
END, JOIN, ADMIT, LEAVE, STEP = range(5)


class Join(NamedTuple):
    """A request joins a free row with `length` positions, as a new one or as one that was there.

    Attributes:
        row: the row.
        length: positions that the request has.
    """

    row: int
    length: int


class Admit(NamedTuple):
    """Its newest positions fill the pages of a pool.

    Attributes:
        row: the row.
        pool: the pool.
    """

    row: int
    pool: int


class Leave(NamedTuple):
    """The row is free again.

    Attributes:
        row: the row.
    """

    row: int


class Step(NamedTuple):
    """A decode step.

    Attributes:
        rows: int32 active rows.
        accepted: int32 tokens that each of them went on by.
        selection: int32 selected positions, NO_SLOT for none.
    """

    rows: Int[np.ndarray, " n"]
    accepted: Int[np.ndarray, " n"]
    selection: Int[np.ndarray, "pools n T K"]


Happened = Join | Admit | Leave | Step
"""What a recording is a list of."""


class Recorder:
    """A `Watcher` that writes a recording of what an engine does.

    What a dispatch selected is read when the next one has been launched, so that the device never
    waits for the recording.

    Args:
        file: where to; it stays open.
        cfg: sizes of the engine's hierarchy; `record_selections` is set.

    Raises:
        UserError: there is more history than records, which a recording does not describe.
    """

    def __init__(self, file: BinaryIO, cfg: HierarchyConfig) -> None:
        assert cfg.record_selections  # else a step has nothing to record
        cfg.geometry.check_movable("a recording of selections")
        self._file, self._bits = file, cfg.capacity.bit_length()
        self._active: set[int] = set()
        self._pending: list[bytes | _Launched] = []  # from the latest dispatch on
        self._error: OSError | None = None
        head = {"format": FORMAT, "version": VERSION, "bits": self._bits}
        sizes = dataclasses.asdict(cfg)
        del sizes["record_layout"]  # of this machine; nothing that is recorded depends on it
        self._write(json.dumps(head | {"config": sizes}).encode() + b"\n")

    def joined(self, row: int, length: int) -> None:
        """See `Watcher`."""
        self._active.add(row)
        self._pending.append(_event(JOIN, row, length))

    def admitted(self, row: int, pool: int) -> None:
        """See `Watcher`."""
        self._pending.append(_event(ADMIT, row, pool))

    def left(self, row: int) -> None:
        """See `Watcher`."""
        self._active.remove(row)
        self._pending.append(_event(LEAVE, row))

    def stepped(self, output: Packed) -> None:
        """See `Watcher`."""
        self._write_pending()
        rows = np.array(sorted(self._active), np.int32)
        self._pending.append(_Launched(rows, output))

    def finish(self) -> None:
        """The recording is whole.

        Raises:
            OSError: it is not, since something could not be written.
        """
        self._write_pending()
        self._write(_event(END))
        self._file.flush()
        if self._error:
            raise self._error

    def _write_pending(self) -> None:
        for item in self._pending:
            self._write(item if isinstance(item, bytes) else item.packed(self._bits))
        self._pending.clear()

    def _write(self, data: bytes) -> None:
        # Not in the middle of a step, whose state would be lost: the run goes on without.
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error


class _Launched(NamedTuple):
    """A dispatch on its way."""

    rows: Int[np.ndarray, " n"]
    output: Packed

    def packed(self, bits: int) -> bytes:
        """Its steps, as they are written; waits for its end."""
        output = unpacked(self.output)
        parts: list[bytes] = []
        for count, selection in zip(output.count, output.selection, strict=True):
            numbers = (self.rows, count[self.rows])
            parts.append(_event(STEP, len(self.rows)))
            parts.extend(array.astype("<i4").tobytes() for array in numbers)
            parts.append(packed_bits(selection[:, self.rows], bits).tobytes())
        return b"".join(parts)


def _event(kind: int, a: int = 0, b: int = 0) -> bytes:
    return np.array([kind, a, b], "<i4").tobytes()


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording, read.

    Attributes:
        cfg: sizes of the hierarchy that it was made with.
        events: what happened, in order.
    """

    cfg: HierarchyConfig
    events: tuple[Happened, ...]


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        UserError: it cannot be read, is none, or is not whole.
    """
    try:
        with path.open("rb") as file:
            head = _head(file, path)
            cfg = _config(head["config"])
            return Recording(cfg, tuple(_events(file, cfg, head["bits"], path)))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _head(file: BinaryIO, path: Path) -> dict[str, Any]:
    head: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = json.loads(file.readline())
        head = found if isinstance(found, dict) else {}
    if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise UserError(f"{path} is not a recording of selections, version {VERSION}")
    return head


def _config(fields: dict[str, Any]) -> HierarchyConfig:
    geometry: dict[str, Any] = dict(fields["geometry"])
    row = dict(geometry["row"])
    if isinstance(row["dtype"], dict):
        row["dtype"] = ScaledRow(**row["dtype"])
    geometry["row"] = RowFormat(**row)
    geometry["layers_per_pool"] = tuple(geometry["layers_per_pool"])
    geometry["rates"] = tuple(geometry["rates"])
    geometry["group_layers"] = tuple(geometry["group_layers"])
    # A model whose layers keep more is not recorded.
    geometry["kept"] = geometry["candidates"] = ()
    typed: dict[str, Any] = {"geometry": Geometry(**geometry), "policy": Policy(fields["policy"])}
    return HierarchyConfig(**{**fields, **typed})


def _events(file: BinaryIO, cfg: HierarchyConfig, bits: int, path: Path) -> Iterator[Happened]:
    def integers(count: int) -> Int[np.ndarray, " count"]:
        return np.frombuffer(whole(4 * count), "<i4").astype(np.int32)

    def whole(size: int) -> bytes:
        data = file.read(size)
        if len(data) < size:
            raise UserError(f"{path} ends in the middle: the recording was not finished")
        return data

    while True:
        kind, a, b = integers(3).tolist()
        match kind:
            case 1:
                yield Join(a, b)
            case 2:
                yield Admit(a, b)
            case 3:
                yield Leave(a)
            case 4:
                rows, accepted = integers(a), integers(a)
                shape = (cfg.pools, a, cfg.queries, cfg.geometry.top_k)
                size = -(-int(np.prod(shape)) * bits // 8)
                data = np.frombuffer(whole(size), np.uint8)
                yield Step(rows, accepted, unpacked_bits(data, bits, shape))
            case 0:
                return
            case _:
                raise UserError(f"{path} has an event of kind {kind}; there are {END} to {STEP}")


def packed_bits(ids: Int[np.ndarray, "*n"], bits: int) -> UInt8[np.ndarray, " bytes"]:
    """Ids from -1 on, each plus 1 in `bits` bits; see the module."""
    place = np.arange(bits - 1, -1, -1, dtype=np.uint32)
    return np.packbits(((ids.reshape(-1, 1) + 1).astype(np.uint32) >> place & 1).astype(np.uint8))


def unpacked_bits(
    data: UInt8[np.ndarray, " bytes"], bits: int, shape: tuple[int, ...]
) -> Int[np.ndarray, "*n"]:
    """The reverse of `packed_bits`."""
    place = np.arange(bits - 1, -1, -1, dtype=np.uint32)
    each = np.unpackbits(data, count=int(np.prod(shape)) * bits).reshape(-1, bits)
    ids = (each.astype(np.uint32) << place).sum(axis=1, dtype=np.uint32).astype(np.int32) - 1
    return ids.reshape(shape)
