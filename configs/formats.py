"""Formats that a model keeps its history in: the rows of every layer, and the index keys.

Knows what the formats are; knows nothing about arrays.
"""

from dhisparse_jax.config import FP8
from dhisparse_jax.errors import UserError

COMPUTED = "computed"
"""The dtype that the model computes in."""

HISTORY_FORMATS = (COMPUTED, "float32", "bfloat16", FP8)
"""FP8 is numbers of 8 bits with scales.

Rows are in FlashMLA's layout: e4m3 latents with a float32 scale for each 128 of them, and bfloat16
rotated keys; 656 B with the sizes of GLM-5.x. Index keys are multiplied by the Hadamard matrix and
have a float32 scale each; 132 B. Queries are rotated too, and stay in the dtype of the computation:
published implementations quantise them as well, for matrix units that multiply nothing else.
"""


def check_history_formats(rows: str, keys: str, index_dim: int) -> None:
    """Raises UserError where there is no such format, or it is not possible with these sizes."""
    for name, value in (("kv_format", rows), ("index_format", keys)):
        if value not in HISTORY_FORMATS:
            raise UserError(f"{name} is {value!r}; use one of {', '.join(HISTORY_FORMATS)}")
    if keys == FP8 and index_dim & (index_dim - 1):
        raise UserError(
            f"index_format is 'fp8', whose Hadamard matrix needs a power of two as index_dim, not "
            f"{index_dim}; use 'bfloat16'"
        )
