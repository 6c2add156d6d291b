"""The options that only `plan` has, as `options` has the others."""

from pathlib import Path
from typing import Annotated

import typer

from dhisparse_jax.cli.checks import count, positive
from dhisparse_jax.cli.options import OUTPUT, SPECULATION

PlannedModel = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="Sizes of a model: glm-5.3, or tiny.")
]
GpuName = Annotated[str, typer.Option("--gpu", metavar="NAME", help="The decode GPUs: h200.")]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus",
        metavar="N",
        callback=count,
        help="Decode GPUs: each has requests of its own, and a part of the experts for all.",
    ),
]
Context = Annotated[
    int,
    typer.Option(
        "--context", metavar="N", callback=count, help="Positions of every request's history."
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency", metavar="N", callback=count, help="Requests on all GPUs together."
    ),
]
PlannedDraft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="none|dflash2|dspark",
        help="Sizes of a draft for the model.",
        rich_help_panel=SPECULATION,
    ),
]
AcceptLength = Annotated[
    float | None,
    typer.Option(
        "--accept-length",
        metavar="X",
        callback=positive,
        help="Tokens per step and request with the draft. Default: published ones, 5.29 of 8.",
        rich_help_panel=SPECULATION,
    ),
]
PlanJson = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the plan as JSON; -: to standard output, and the tables to standard error.",
        rich_help_panel=OUTPUT,
    ),
]
