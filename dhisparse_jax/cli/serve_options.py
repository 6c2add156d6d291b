"""The options that only `dhisparse serve` has, as `options` has the others."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dhisparse_jax.cli.checks import not_negative, positive
from dhisparse_jax.cli.options import OUTPUT


class TimeName(StrEnum):
    """How the time between arrivals passes."""

    REAL = "real"
    VIRTUAL = "virtual"


Trace = Annotated[
    Path,
    typer.Option(
        "--trace",
        metavar="FILE.jsonl",
        help="Requests, a JSON object a line: arrival, prompt_file or prompt_tokens, "
        "output_tokens, seed.",
    ),
]
Time = Annotated[
    TimeName,
    typer.Option(
        "--time", help="real: wait for the next arrival; virtual: skip what is only waiting."
    ),
]
TpotMs = Annotated[
    float | None,
    typer.Option(
        "--tpot-ms",
        metavar="B",
        callback=positive,
        help="Hold the time per output token under B milliseconds: fewer requests at once, prompts "
        "in pieces, and with a draft, as many tokens verified as pay. Default: most tokens per "
        "second.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        "--interval",
        metavar="S",
        callback=not_negative,
        help="Seconds between two samples of the time series.",
        rich_help_panel=OUTPUT,
    ),
]
