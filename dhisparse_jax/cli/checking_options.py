"""The options that only `doctor` and `audit` have, as `options` has the others."""

from pathlib import Path
from typing import Annotated

import typer

from dhisparse_jax.cli.checks import count
from dhisparse_jax.cli.options import (
    ATTACHED_DRAFT,
    BUNDLED_DRAFT,
    HIERARCHY,
    OUTPUT,
    SPECULATION,
)

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write what was found as one JSON document, also when interrupted; -: to standard "
        "output, and the table to standard error.",
        rich_help_panel=OUTPUT,
    ),
]

AuditedModel = Annotated[
    str,
    typer.Argument(
        metavar="[tiny|DIR]",
        help="The bundled model, or the folder of a Hugging Face checkpoint.",
    ),
]
HotRows = Annotated[
    int | None,
    typer.Option(
        "--hot-rows",
        metavar="N",
        callback=count,
        help="Rows of history per request, and pool of layers, that the device holds. Default: "
        "half of what a step selects, so that much is fetched.",
        rich_help_panel=HIERARCHY,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="none|dflash|dflash2|dspark|DIR",
        help="A small model that proposes tokens. none: for E2 and E3 one that knows the texts and "
        f"sometimes errs. Default: {BUNDLED_DRAFT} for tiny, {ATTACHED_DRAFT} where the checkpoint "
        "has one, else none.",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        "--draft-length",
        metavar="N",
        callback=count,
        help="Tokens to propose per step, all of which are verified. Default: as many as the draft "
        "can.",
        rich_help_panel=SPECULATION,
    ),
]
