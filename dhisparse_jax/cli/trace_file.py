"""Request traces: a JSON object a line. Knows nothing about engines.

    {"arrival": 0.5, "prompt_tokens": 4000, "output_tokens": 200, "seed": 1}
    {"arrival": 2, "prompt_file": "question.txt", "output_tokens": 50}

`arrival` in seconds from the start; a file is looked up from the folder of the trace; `seed` is 0
where it is left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhisparse_jax.cli.checks import MOST_FLOAT32, SEEDS
from dhisparse_jax.cli.prompts import STANDARD_INPUT, read_file
from dhisparse_jax.errors import UserError

_FIELDS = {"arrival", "prompt_file", "prompt_tokens", "output_tokens", "seed"}


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace.

    Attributes:
        where: file and line, for messages.
        arrival: seconds from the start.
        prompt_file: what the prompt was read from; None where only its length is given.
        prompt: the prompt's bytes; None likewise.
        prompt_tokens: its length where only that is given, else 0.
        output_tokens: tokens to add.
        seed: of the random draws.
    """

    where: str
    arrival: float
    prompt_file: Path | None
    prompt: bytes | None
    prompt_tokens: int
    output_tokens: int
    seed: int


def read_trace(path: Path) -> list[TraceLine]:
    """All requests of a trace; empty lines are skipped.

    Raises:
        UserError: the file cannot be read or has no request, or a line is bad; names the line.
    """
    try:
        text = read_file(str(path)).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    lines = [
        _parse(f"{path}:{number}", line, path.parent)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not lines:
        raise UserError(f"{path} has no request; a line is a JSON object with arrival, ...")
    return lines


def _parse(where: str, line: str, folder: Path) -> TraceLine:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{where}: not a JSON object but {type(values).__name__}")
    if unknown := sorted(values.keys() - _FIELDS):
        known = ", ".join(sorted(_FIELDS))
        raise UserError(f"{where}: unknown field {unknown[0]}; there are {known}")
    if ("prompt_file" in values) == ("prompt_tokens" in values):
        raise UserError(f"{where}: give either prompt_file or prompt_tokens")
    by_length = "prompt_tokens" in values
    path = None if by_length else _path(where, values["prompt_file"], folder)
    return TraceLine(
        where=where,
        arrival=_seconds(where, values),
        prompt_file=path,
        prompt=None if path is None else _prompt(where, path),
        prompt_tokens=_whole(where, values, "prompt_tokens", 1) if by_length else 0,
        output_tokens=_whole(where, values, "output_tokens", 1),
        seed=_whole(where, {"seed": 0} | values, "seed", 0),
    )


def _seconds(where: str, values: dict[str, Any]) -> float:
    value = values.get("arrival")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_FLOAT32:
        raise UserError(f"{where}: arrival is {value}; it must be seconds, 0 or more")
    return float(value)


def _whole(where: str, values: dict[str, Any], name: str, least: int) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < SEEDS:
        raise UserError(
            f"{where}: {name} is {value}; it must be a whole number of {least} to {SEEDS - 1}"
        )
    return value


def _path(where: str, name: object, folder: Path) -> Path:
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: prompt_file is {name}; it must be the name of a file")
    if name == STANDARD_INPUT:
        raise UserError(
            f"{where}: prompt_file is {name}: standard input can be read once only; name a file"
        )
    return folder / name


def _prompt(where: str, path: Path) -> bytes:
    try:
        return read_file(str(path))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
