"""The training text: sources of the Python standard library, which every machine has.

Some modules, with their tests, are left out of training; the model is evaluated on them.
"""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dhisparse_jax.errors import UserError

EVALUATION_MODULES = (
    "argparse",
    "difflib",
    "heapq",
    "ipaddress",
    "shutil",
    "statistics",
    "tarfile",
    "textwrap",
)
"""Modules that never enter training, nor do files or folders called `test_<module>*`."""

SEPARATOR = 0
"""Byte between documents; no document contains it, and every evaluated file starts with it."""

# Installed packages, and generated tables that read like random numbers.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data"})
_MIN_DOCUMENT_BYTES = 64


@dataclass(frozen=True)
class Corpus:
    """Training stream and evaluation files.

    Attributes:
        stream: All training documents, a separator before each, as uint8.
        evaluation: File name to content, in the order of `EVALUATION_MODULES`.
        documents: Number of training documents.
        digest: SHA-256 of the stream and the evaluation files.
        python: Version of the interpreter, whose library this is unless a folder was given.
    """

    stream: np.ndarray
    evaluation: dict[str, bytes]
    documents: int
    digest: str
    python: str

    def record(self) -> dict[str, object]:
        """What a run record says about the corpus."""
        return {
            "train_bytes": self.stream.size,
            "documents": self.documents,
            "evaluation_bytes": {name: len(text) for name, text in self.evaluation.items()},
            "sha256": self.digest,
            "python": self.python,
        }


def load_corpus(directory: Path | None = None) -> Corpus:
    """Reads every `.py` file under a folder, in sorted order.

    Args:
        directory: Folder to read; the standard library of the running interpreter when None.

    Raises:
        UserError: The folder lacks an evaluation module, or has no training text.
    """
    root = _library(directory)
    evaluation = load_evaluation(directory)
    documents = [text for path in _training_files(root) if (text := _document(path)) is not None]
    if not documents:
        raise UserError(f"{root} has no Python sources to train on")
    separator = bytes([SEPARATOR])
    stream = separator + separator.join(documents) + separator
    digest = hashlib.sha256(stream)
    for name, text in evaluation.items():
        digest.update(name.encode() + separator + text)
    return Corpus(
        stream=np.frombuffer(stream, np.uint8),
        evaluation=evaluation,
        documents=len(documents),
        digest=digest.hexdigest(),
        python=platform.python_version(),
    )


def load_evaluation(directory: Path | None = None) -> dict[str, bytes]:
    """File name to content of the modules that training leaves out.

    Args:
        directory: Folder to read; the standard library of the running interpreter when None.

    Raises:
        UserError: The folder lacks one of them.
    """
    root = _library(directory)
    return {f"{name}.py": _evaluation_file(root, name) for name in EVALUATION_MODULES}


def _library(directory: Path | None) -> Path:
    return Path(sysconfig.get_path("stdlib")) if directory is None else directory


def _evaluation_file(root: Path, module: str) -> bytes:
    path = root / f"{module}.py"
    if not path.is_file():
        raise UserError(f"{root} has no {path.name}, which the evaluation needs")
    return path.read_bytes()


def _training_files(root: Path) -> Iterator[Path]:
    """Sources that may be trained on, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _SKIPPED_FOLDERS.intersection(parts[:-1]) and not _is_left_out(parts):
            yield path


def _is_left_out(parts: tuple[str, ...]) -> bool:
    """Whether a path is an evaluation module, a part of one, or a test of one."""
    return any(
        part == name or part == f"{name}.py" or part.startswith(f"test_{name}")
        for part in parts
        for name in EVALUATION_MODULES
    )


def _document(path: Path) -> bytes | None:
    """Content of a file; None if it is next to empty, not UTF-8, or holds the separator."""
    text = path.read_bytes()
    if len(text) < _MIN_DOCUMENT_BYTES or SEPARATOR in text:
        return None
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text
