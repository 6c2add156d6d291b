"""Formats of quantised weights: small numbers, and scales that blocks of them share.

Knows what the formats are; knows nothing about arrays or files.
"""

from dataclasses import dataclass

from dhisparse_jax.errors import UserError


@dataclass(frozen=True)
class WeightFormat:
    """A matrix `[out, in]` as numbers and scales: a weight is its number times its block's scale.

    Blocks at the ends are cut off: 576 rows in blocks of 128 have 5 rows of scales, not 4.5.

    Attributes:
        packed: numbers are 4-bit floats (e2m1), two in a byte, the first of them in the low half;
            else they are 8-bit floats (e4m3).
        scale: dtype of the scales: "float32", or "float8_e8m0fnu", a power of two in a byte.
        block: rows and columns of a block.
    """

    packed: bool
    scale: str
    block: tuple[int, int]

    @property
    def scales_are_powers(self) -> bool:
        """Whether scales are powers of two, which change no digit of a number."""
        return self.scale == "float8_e8m0fnu"

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the numbers of a matrix."""
        return rows, columns // 2 if self.packed else columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a matrix."""
        return -(-rows // self.block[0]), -(-columns // self.block[1])


FLOAT = "float"
"""Weights that are not quantised."""

FORMATS: dict[str, WeightFormat] = {
    "fp8": WeightFormat(packed=False, scale="float32", block=(128, 128)),
    "fp8-e8m0": WeightFormat(packed=False, scale="float8_e8m0fnu", block=(128, 128)),
    "fp8-e8m0-32": WeightFormat(packed=False, scale="float8_e8m0fnu", block=(32, 32)),
    "fp8-rows": WeightFormat(packed=False, scale="float8_e8m0fnu", block=(1, 32)),
    "fp4": WeightFormat(packed=True, scale="float8_e8m0fnu", block=(1, 32)),
}
"""By name. GLM-5.x and DeepSeek-V3.2: fp8; V4: fp8-e8m0, experts fp4; V4.1: fp8-e8m0-32, experts
fp4, tables of n-grams fp8-rows."""


def name_of(weights: WeightFormat) -> str:
    """The name of a format.

    Raises:
        UserError: it has none.
    """
    for name, known in FORMATS.items():
        if known == weights:
            return name
    raise UserError(
        f"weights with {weights.scale} scales for blocks of {weights.block[0]} x "
        f"{weights.block[1]} cannot stay quantised; formats that can: {', '.join(FORMATS)}"
    )
