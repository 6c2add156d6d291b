"""The options of how a token is chosen, as `options` has the others."""

from dataclasses import dataclass
from typing import Annotated

import typer

from dhisparse_jax.cli.checks import not_negative, probability, seed_value, top_k

SAMPLING = "Sampling"


@dataclass(frozen=True)
class SamplingOptions:
    """The options of sampling, as given; `dhisparse_jax.sampling.Sampling` says what they mean."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="T",
        callback=not_negative,
        help="0: the most likely token; the higher, the more random.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="K",
        callback=top_k,
        help="Sample from the K most likely tokens; 0: from all.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        callback=probability,
        help="Sample from the most likely tokens that together have this probability; 1: all.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="S",
        callback=seed_value,
        help="The same seed and prompts give the same tokens.",
        rich_help_panel=SAMPLING,
    ),
]
