"""Prompt files, and the prompts that are used without one. Knows nothing about tokens."""

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dhisparse_jax.errors import UserError

STANDARD_INPUT = "-"
# Bytes of the default prompts. Different lengths, so that requests differ in how much history
# they have; the bundled model's context is 8,192.
DEFAULT_LENGTHS = (6000, 4500, 3000, 1500)


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
    """File names without folders where those are distinct, else the paths as given."""
    names = ["stdin" if path == STANDARD_INPUT else Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def default_prompts(max_bytes: int, library: Path | None = None) -> list[Prompt]:
    """The beginnings of standard library modules that the bundled model was not trained on.

    Args:
        max_bytes: the longest prompt that may be made, in bytes.
        library: the folder of the standard library; by default this Python's own.

    Returns:
        One prompt for each of DEFAULT_LENGTHS, longest first, each from another module and cut at
        the end of a line.

    Raises:
        UserError: this Python has no library sources, or too few of the left-out modules.
    """
    folder = library or Path(sysconfig.get_path("stdlib"))
    texts = {path.name: path.read_bytes() for path in _left_out_files(folder)}
    # Most bytes first: the longest prompts need the longest modules.
    by_size = sorted(texts, key=lambda name: (-len(texts[name]), name))
    lengths = [min(length, max_bytes) for length in DEFAULT_LENGTHS]
    names = [name for name in by_size if len(texts[name]) > lengths[0]][: len(lengths)]
    if len(names) < len(lengths):
        raise UserError(
            f"the default prompts need {len(lengths)} standard library sources that the bundled "
            f"model was not trained on, and {folder} has {len(names)}: give --prompt-file FILE"
        )
    return [
        Prompt(name, cut_at_line_end(texts[name], length))
        for name, length in zip(names, lengths, strict=True)
    ]


def cut_at_line_end(data: bytes, length: int) -> bytes:
    """The first `length` bytes, less an unfinished last line where there is a finished one."""
    head = data[:length]
    return head[: head.rfind(b"\n") + 1] or head


def _left_out_files(folder: Path) -> list[Path]:
    """Sources of the modules that training left out, as far as `folder` has them."""
    from dhisparse_jax.models.train.corpus import EVALUATION_MODULES

    paths = [folder / f"{name.replace('.', '/')}.py" for name in EVALUATION_MODULES]
    return [path for path in paths if path.is_file()]
