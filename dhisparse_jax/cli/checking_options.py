"""The options that only `doctor` and `audit` have, as `options` has the others."""

from pathlib import Path
from typing import Annotated

import typer

from dhisparse_jax.cli.options import OUTPUT

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write what was found as one JSON document, also when interrupted.",
        rich_help_panel=OUTPUT,
    ),
]
