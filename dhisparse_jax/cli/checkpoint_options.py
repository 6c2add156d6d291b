"""The options that only `convert` and `verify-hf` have, as `options` has the others."""

from typing import Annotated

import typer

from dhisparse_jax.cli.checks import count, not_negative
from dhisparse_jax.cli.options import DtypeName

# What convert reads and writes
SourceDir = Annotated[
    str, typer.Argument(metavar="HF_DIR", help="The folder of a Hugging Face checkpoint.")
]
TargetDir = Annotated[
    str, typer.Argument(metavar="OUT", help="The folder to write, which must not exist.")
]
ConvertDtype = Annotated[
    DtypeName | None,
    typer.Option(
        "--dtype",
        help="What quantised weights become, but for experts that stay stored, and weights that "
        "are stored as more than config.json says. Default: the least that loses nothing, float32 "
        "where scales are; it becomes bfloat16 when it is loaded with --dtype bfloat16.",
    ),
]

# What verify-hf compares
CheckpointDir = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint folder with inputs.npy ([1, S] token ids) and logits.npy ([1, S, V] or "
        "[S, V]) beside its weights.",
    ),
]
Split = Annotated[
    int | None,
    typer.Option(
        "--split",
        metavar="N",
        callback=count,
        help="Tokens to prefill; the rest are decoded one by one. Default: half of S.",
    ),
]
Queries = Annotated[
    int,
    typer.Option(
        "--queries",
        metavar="T",
        callback=count,
        help="Tokens to decode per step, as with a draft of T - 1.",
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        "--tolerance",
        metavar="D",
        callback=not_negative,
        help="Largest absolute difference of a logit that passes.",
    ),
]
