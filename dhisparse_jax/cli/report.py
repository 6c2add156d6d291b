"""The JSON documents: written whole or not at all. Knows nothing about display."""

import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhisparse_jax.cli.prompts import STANDARD_INPUT
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from dhisparse_jax.cli.record import RunRecord
    from dhisparse_jax.engine.memory import Sizes

# A list of integers over several lines. A string cannot match: it holds no line ends.
_NUMBERS = re.compile(r"\[\n([\d,\s-]+)\]")


@dataclass(frozen=True)
class Setting:
    """What a run ran with: the head of every document."""

    model: str
    backend: str
    jax_version: str
    policy: str
    draft: str = "none"


def decode_document(setting: Setting, record: "RunRecord", sizes: "Sizes") -> dict[str, Any]:
    """The document of `dhisparse decode --json`. Times in seconds, sizes in bytes."""
    return {
        "model": setting.model,
        "backend": setting.backend,
        "jax_version": setting.jax_version,
        "policy": setting.policy,
        "draft": setting.draft,
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


def check_output(json: Path | None, inputs: Iterable[str | Path]) -> None:
    """Raises UserError where the document would replace what is read; - is standard input."""
    for name in inputs:
        if json and str(name) != STANDARD_INPUT and json.exists() and os.path.samefile(json, name):
            raise UserError(f"--json {json} is also read; name another file")


class OutputFile:
    """A file that appears whole or not at all.

    Made before the work starts, so that a path that cannot be written is found at once. What is
    already at the path stays until `write` replaces it.
    """

    def __init__(self, path: Path) -> None:
        """Prepare to write `path`.

        Raises:
            UserError: `path` is a directory, its folder is missing, or it cannot be written.
        """
        if path.is_dir():
            raise UserError(f"--json {path} is a directory; name a file")
        if not path.parent.is_dir():
            raise UserError(f"--json {path}: there is no folder {path.parent}")
        # A link keeps being one. A device or pipe (/dev/stdout) cannot be replaced by a rename.
        self._path = Path(os.path.realpath(path)) if not _is_special(path) else path
        self._temporary: Path | None = None
        try:
            if _is_special(path):
                with path.open("a"):
                    return
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=self._path.parent)
        except OSError as error:
            raise UserError(f"--json {path} cannot be written: {error.strerror}") from None
        os.close(handle)
        self._temporary = Path(name)

    def write(self, document: dict[str, Any]) -> None:
        """Write `document`, indented but with a line per list of numbers, and put it in place.

        Raises:
            UserError: it cannot be written, for example because the disk is full.
        """
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
        try:
            self._put(text)
        except OSError as error:
            raise UserError(f"--json {self._path} cannot be written: {error.strerror}") from None

    def _put(self, text: str) -> None:
        if self._temporary is None:
            self._path.write_text(text, encoding="utf-8")
            return
        self._temporary.write_text(text, encoding="utf-8")
        self._temporary.chmod(0o666 & ~_umask())  # mkstemp's 0600 would surprise
        self._temporary.replace(self._path)
        self._temporary = None

    def discard(self) -> None:
        """Remove what was prepared and not written; does nothing after `write`."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
