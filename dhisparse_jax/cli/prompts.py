"""Prompt files, and the prompts that are used without one. Knows nothing about tokens."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dhisparse_jax.errors import UserError

STANDARD_INPUT = STANDARD_OUTPUT = "-"
# Different lengths, so that requests differ in how much history they have.
DEFAULT_PROMPTS = (
    ("textwrap.py", 6000),
    ("ipaddress.py", 4500),
    ("shutil.py", 3100),
    ("difflib.py", 1500),
)


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and the name that it is shown under."""

    name: str
    data: bytes


def read_prompts(paths: Sequence[str]) -> list[Prompt]:
    """Read each file as one prompt; `-` is standard input.

    Raises:
        UserError: a file is missing, empty, a directory or unreadable.
    """
    return [
        Prompt(name, read_file(path)) for name, path in zip(short_names(paths), paths, strict=True)
    ]


def read_file(path: str) -> bytes:
    """The bytes of a file, or of standard input for `-`; at least one byte.

    Raises:
        UserError: as `read_prompts`.
    """
    if path == STANDARD_INPUT and sys.stdin is None:
        raise UserError("standard input is closed; name a file with -p")
    try:
        data = sys.stdin.buffer.read() if path == STANDARD_INPUT else Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; name the files in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}") from None
    if not data:
        name = "standard input" if path == STANDARD_INPUT else path
        raise UserError(f"{name} is empty; at least one byte is needed")
    return data


def short_names(paths: Sequence[str]) -> list[str]:
    """File names without folders where those are distinct, else the paths as given.

    What cannot be printed (a path may hold any byte) is replaced.
    """
    names = ["stdin" if path == STANDARD_INPUT else Path(path).name for path in paths]
    chosen = names if len(set(names)) == len(names) else paths
    return [
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
        for name in chosen
    ]


def default_prompts(max_bytes: int, library: Path | None = None) -> list[Prompt]:
    """The beginnings of standard library modules that the bundled model was not trained on.

    Args:
        max_bytes: the longest prompt that may be made, in bytes.
        library: the folder of the standard library; by default this Python's own.

    Returns:
        One prompt for each of DEFAULT_PROMPTS, longest first. A prompt ends with the head of a
        function, so that its body is what is asked for.

    Raises:
        UserError: this Python has no library sources, or lacks one of the left-out modules.
    """
    from dhisparse_jax.models.train.corpus import load_evaluation

    try:
        texts = load_evaluation(library)
    except UserError as error:
        raise UserError(f"no default prompts: {error}; give --prompt-file FILE") from error
    return [
        Prompt(name, cut_after_head(texts[name], min(length, max_bytes)))
        for name, length in DEFAULT_PROMPTS
    ]


def cut_after_head(data: bytes, length: int) -> bytes:
    """The first `length` bytes up to the head of their last function, or to a line's end."""
    heads = list(re.finditer(rb"^ *def [^\n]*:\n", data[:length], re.MULTILINE))
    return data[: heads[-1].end()] if heads else cut_at_line_end(data, length)


def cut_at_line_end(data: bytes, length: int) -> bytes:
    """The first `length` bytes, less an unfinished last line where there is a finished one."""
    head = data[:length]
    return head[: head.rfind(b"\n") + 1] or head
