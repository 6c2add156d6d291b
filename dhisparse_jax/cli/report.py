"""The JSON documents: written whole or not at all. Knows nothing about display."""

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dhisparse_jax.cli.prompts import STANDARD_INPUT, STANDARD_OUTPUT
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from dhisparse_jax.cli.record import RunRecord
    from dhisparse_jax.engine.memory import Sizes

# A list of numbers over several lines. A string cannot match: it holds no line ends.
_NUMBERS = re.compile(r"\[\n([\d,\s.e+-]+)\]")


NO_MESH = "none"


@dataclass(frozen=True)
class Setting:
    """What a run ran with: the head of every document. Sizes beside it are those of one device."""

    model: str
    backend: str
    jax_version: str
    policy: str
    draft: str = "none"
    kv_format: str = "float32"
    index_format: str = "float32"
    mesh: str = NO_MESH


def decode_document(setting: Setting, record: "RunRecord", sizes: "Sizes") -> dict[str, Any]:
    """The document of `dhisparse decode --json`. Times in seconds, sizes in bytes."""
    return {
        "model": setting.model,
        "backend": setting.backend,
        "jax_version": setting.jax_version,
        "policy": setting.policy,
        "draft": setting.draft,
        "kv_format": setting.kv_format,
        "index_format": setting.index_format,
        "mesh": setting.mesh,
        "requests": [
            {
                "name": request.name,
                "prompt_tokens": request.prompt_tokens,
                "new_tokens": len(request.tokens),
                "tokens": request.tokens,
                "finish_reason": request.finish_reason,
            }
            for request in record.requests
        ],
        "metrics": {
            "output_tokens": record.output_tokens,
            "seconds": record.seconds,
            "tokens_per_s": record.tokens_per_s,
            "prefill_seconds": record.prefill_seconds,
            "decode_seconds": record.decode_seconds,
            "steady_tokens_per_s": record.steady_tokens_per_s,
            "steps": record.steps,
            "accept_length": record.acceptance.length,
            "accept_by_position": list(record.acceptance.by_position),
            "draft_seconds": record.draft_seconds,
            "verify_seconds": record.verify_seconds,
            "selected_rows": record.totals.selected_rows,
            "fetched_rows": record.totals.fetched_rows,
            "fetched_share": record.fetched_share,
            "host_bytes_read": record.totals.host_bytes_read,
            "host_bytes": sizes.host_bytes,
            "hot_bytes": sizes.hot_bytes,
            "tail_bytes": sizes.tail_bytes,
            "draft_bytes": sizes.draft_bytes,
        },
    }


def json_line(document: dict[str, Any]) -> str:
    """One line of strict JSON. NaN and infinities are not JSON: write them as null before."""
    return json.dumps(document, allow_nan=False)


def document_text(document: dict[str, Any], *, allow_nan: bool = False) -> str:
    """The document indented, but with a line per list of numbers."""
    text = json.dumps(document, indent=2, allow_nan=allow_nan) + "\n"
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def _check_outputs(written: Mapping[str, Path | None], read: Iterable[str | Path]) -> None:
    """Whether no file that is written replaces one that is read, or another one that is written.

    Args:
        written: files by the option that names them; None for none.
        read: files; - is standard input.

    Raises:
        UserError: one does.
    """
    given = [(option, path) for option, path in written.items() if path]
    for option, path in given:
        for name in read:
            if str(name) != STANDARD_INPUT and path.exists() and os.path.samefile(path, name):
                raise UserError(f"{option} {path} is also read; name another file")
    for (first, path), (second, other) in itertools.combinations(given, 2):
        if os.path.realpath(path) == os.path.realpath(other):
            raise UserError(f"{first} and {second} are both {path}; name two files")


class OutputFile:
    """A file that appears whole or not at all.

    Made before the work starts, so that a path that cannot be written is found at once. What is
    already at the path stays until `keep` replaces it. Until then the new one has no name, so that
    a process that is killed leaves nothing; where the file system has no such files, another one.

    Attributes:
        standard: whether it is none, but standard output, as `--json -` says.
    """

    def __init__(self, path: Path, option: str = "--json") -> None:
        """Prepare to write `path`, which an option named.

        Raises:
            UserError: `path` is a directory, its folder is missing, or it cannot be written; or it
                is standard output, which only documents go to.
        """
        self.standard = str(path) == STANDARD_OUTPUT
        if self.standard and option != "--json":
            raise UserError(f"{option} {path}: only --json goes to standard output; name a file")
        if path.is_dir():
            raise UserError(f"{option} {path} is a directory; name a file")
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}")
        # A link keeps being one. A device or pipe (/dev/stdout) cannot be replaced by a rename.
        self._special = _is_special(path)
        self._path = path if self._special else Path(os.path.realpath(path))
        self._temporary: Path | None = None
        self._nameless: int | None = None
        self._option = option
        try:
            if self.standard:
                return
            if self._special:
                with path.open("a"):
                    return
            with self.open():
                pass
        except OSError as error:
            raise UserError(f"{option} {path} cannot be written: {error.strerror}") from None
        self.discard()

    def write(self, document: dict[str, Any]) -> None:
        """Write `document` and put it in place.

        Raises:
            UserError: it cannot be written, for example because the disk is full.
            BrokenPipeError: nobody reads standard output any more.
        """
        if self.standard:
            sys.stdout.write(document_text(document))
            sys.stdout.flush()
            return
        try:
            with self.open() as file:
                file.write(document_text(document).encode())
            self.keep()
        except OSError as error:
            where = f"{self._option} {self._path}"
            raise UserError(f"{where} cannot be written: {error.strerror}") from None

    def open(self) -> BinaryIO:
        """What is to become the file, empty."""
        if self._special:
            return self._path.open("wb")
        self.discard()
        self._nameless = _nameless(self._path.parent)
        if self._nameless is not None:
            return os.fdopen(os.dup(self._nameless), "wb")
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        self._temporary = Path(name)
        os.fchmod(handle, 0o666 & ~_umask())  # mkstemp's 0600 would surprise
        return os.fdopen(handle, "wb")

    def keep(self) -> None:
        """Put what was written in place."""
        if self._nameless is not None:
            self._temporary = _named(self._nameless, self._path)
        if self._temporary is not None:
            self._temporary.replace(self._path)
            self._temporary = None
        self.discard()

    def discard(self) -> None:
        """Remove what was prepared and not kept."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        if self._nameless is not None:
            os.close(self._nameless)
            self._nameless = None


def on_standard_output(output: OutputFile | None) -> bool:
    """Whether a document goes to standard output, and what a person reads to standard error."""
    return output is not None and output.standard


@contextlib.contextmanager
def output_files(
    written: Mapping[str, Path | None], read: Iterable[str | Path]
) -> Generator[list[OutputFile | None], None, None]:
    """What a command writes, in the order given; see `_check_outputs`.

    Raises:
        UserError: a file would replace another one, or cannot be written.
    """
    _check_outputs(written, read)
    with contextlib.ExitStack() as stack:
        made = (_output_file(path, option) for option, path in written.items())
        yield [stack.enter_context(output) for output in made]


@contextlib.contextmanager
def _output_file(path: Path | None, option: str) -> Generator[OutputFile | None, None, None]:
    """An `OutputFile` that is discarded if the body does not keep it; None for None."""
    output = OutputFile(path, option) if path else None
    try:
        yield output
    finally:
        if output:
            output.discard()


def _nameless(folder: Path) -> int | None:
    """Descriptor of a new file in a folder that has no name yet; None where there are none such."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not Path("/proc/self/fd").is_dir():  # by which it is named later
        return None
    try:
        return os.open(folder, flag | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # the file system, the kernel
            return None
        raise


def _named(descriptor: int, path: Path) -> Path:
    """Give a file without a name one beside `path`, by which it can replace what is there."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # With a folder's descriptor, which an absolute path makes no use of, the link is followed.
    os.link(f"/proc/self/fd/{descriptor}", beside, src_dir_fd=descriptor)
    return beside


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
