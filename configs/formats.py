"""Formats that a model keeps its history in: the rows of every layer, and the index keys.

Knows what the formats are; knows nothing about arrays.
"""

from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import FP4, FP8

COMPUTED = "computed"
"""The dtype that the model computes in."""

HISTORY_FORMATS = (COMPUTED, "float32", "bfloat16", FP8, FP4)
"""FP8 is numbers of 8 bits with scales.

Rows are in FlashMLA's layout: e4m3 latents with a float32 scale for each 128 of them, and bfloat16
rotated keys; 656 B with the sizes of GLM-5.x. Index keys are multiplied by the Hadamard matrix and
have a float32 scale each; 132 B. Queries are rotated too, and stay in the dtype of the computation:
published implementations quantise them as well, for matrix units that multiply nothing else.

FP4 is numbers of 4 bits with scales, of models that were trained for it. Rows of DeepSeek-V4.1: an
e4m3 scale for each 16 numbers, 288 B; its windows have 8 bits, and a power of two for each 32
numbers, 528 B. Index keys since DeepSeek-V4: a power of two for each 32 numbers, 68 B, multiplied
by the Hadamard matrix before V4.1.
"""


def check_history_formats(
    rows: str,
    keys: str,
    index_dim: int,
    *,
    row_formats: tuple[str, ...] = HISTORY_FORMATS[:-1],
    key_formats: tuple[str, ...] = HISTORY_FORMATS[:-1],
    rotated: bool = True,
) -> None:
    """Raises UserError where there is no such format, or it is not possible with these sizes.

    Args:
        rows: of rows.
        keys: of index keys.
        index_dim: numbers of an index key.
        row_formats: what the model's rows can be kept in.
        key_formats: what its index keys can be kept in.
        rotated: whether small index keys are multiplied by the Hadamard matrix.
    """
    for name, value, known in (
        ("kv_format", rows, row_formats),
        ("index_format", keys, key_formats),
    ):
        if value not in known:
            other = ", for which other models were trained" if value in HISTORY_FORMATS else ""
            named = ", ".join(known[1:])
            raise UserError(f"{name} is {value!r}{other}; leave it out, or use one of {named}")
    if rotated and keys in (FP8, FP4) and index_dim & (index_dim - 1):
        raise UserError(
            f"index_format is {keys!r}, whose Hadamard matrix needs a power of two as index_dim, "
            f"not {index_dim}; use 'bfloat16'"
        )
