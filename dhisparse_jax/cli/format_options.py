"""The options of what history is kept in, as `options` has the others."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from dhisparse_jax.cli.options import HIERARCHY


class FormatName(StrEnum):
    """`dhisparse_jax.configs.formats` by name, without what is not for users to ask for."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True)
class FormatOptions:
    """The formats of history, as given; None: what the model's files say, else --dtype."""

    rows: FormatName | None = None
    keys: FormatName | None = None

    def names(self) -> dict[str, str]:
        """The options that were given, by what the library calls them."""
        given = {"kv_format": self.rows, "index_format": self.keys}
        return {name: f"--{name.replace('_', '-')}" for name, value in given.items() if value}


KvFormat = Annotated[
    FormatName | None,
    typer.Option(
        "--kv-format",
        help="What the rows of history are kept in, on the device and in host memory. fp8: 8-bit "
        "latents with a scale for each 128 of them, and bfloat16 rotated keys; 656 bytes with the "
        "sizes of GLM-5.x, where bfloat16 has 1,152. fp4: 4-bit entries and 8-bit windows of "
        "DeepSeek-V4.1, 288 and 528 bytes. Default: what the model's files say, else "
        "--dtype.",
        rich_help_panel=HIERARCHY,
    ),
]
IndexFormat = Annotated[
    FormatName | None,
    typer.Option(
        "--index-format",
        help="What the index keys are kept in. fp8: 8-bit numbers after a Hadamard rotation, with "
        "a scale each; 132 bytes with the sizes of GLM-5.x, where bfloat16 has 256. fp4: 4-bit "
        "numbers with a scale for each 32, 68 bytes, since DeepSeek-V4. Default: what "
        "the model's files say, else --dtype.",
        rich_help_panel=HIERARCHY,
    ),
]
