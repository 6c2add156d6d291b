"""What a model keeps of a history, and what it needs of a hierarchy. Frozen and hashable."""

import dataclasses
import math

import jax.numpy as jnp

from dhisparse_jax.errors import UserError
from dhisparse_jax.possible import OPAQUE, check_groups, check_number, check_row, check_whole
from pallas_kernels.common.rows import WORD_BYTES, words_of
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.index_scores.types import packed_format

MOST_SCALED = 128
"""Numbers of an fp8 row that share a scale, at most."""

FP8 = "fp8"
"""What formats are called that have numbers of 8 bits, with scales."""

FP4 = "fp4"
"""The same with numbers of 4 bits."""

SCALED_KEYS = "float8_e4m3fn"
"""The `index_dtype` of index keys in fp8, which have a float32 scale each."""

PACKED_KEYS = "float4_e2m1fn"
"""The `index_dtype` of index keys in fp4, whose scales are powers of two."""

KEY_DTYPES = ("float32", "bfloat16", SCALED_KEYS, PACKED_KEYS)
"""What index keys can be."""


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """What one token keeps in one layer: `width` numbers of `dtype`.

    Where all heads share the row (MLA), it is their key, and its first numbers are their value.
    Where it has keys and values of several heads, it is one part for each of them, value first.

    Attributes:
        width: numbers in a row. GLM-5.x: 512 latent + 64 rope.
        value_width: leading numbers that attention sums up, of each part. GLM-5.x: 512.
        dtype: name of the dtype, "float32" or "bfloat16"; or the format of rows in two precisions.
            "uint8" for bytes that the library does not look into.
        kv_heads: heads whose values and keys the row has, that of head 0 first; None: all share it.
    """

    width: int
    value_width: int
    dtype: str | ScaledRow
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        """Refuse a format of rows of another width, and rows that are not whole words."""
        check_row(self.width, self.value_width, self.dtype, self.kv_heads)

    @classmethod
    def mla(cls, latent: int, rope: int, dtype: str) -> "RowFormat":
        """Multi-head latent attention: a latent and a rotated key that all heads share.

        Args:
            latent: numbers that attention sums up.
            rope: numbers after them.
            dtype: "float32" or "bfloat16".
        """
        return cls(width=latent + rope, value_width=latent, dtype=dtype)

    @classmethod
    def gqa(cls, kv_heads: int, head: int, dtype: str, value: int | None = None) -> "RowFormat":
        """Keys and values of every head (MHA), or of fewer heads than there are queries (GQA, MQA).

        Args:
            kv_heads: heads that have a key and a value.
            head: numbers in a key, and in a query.
            dtype: "float32" or "bfloat16".
            value: numbers in a value; None: as many.
        """
        value = head if value is None else value
        width = kv_heads * (value + head)
        return cls(width=width, value_width=value, dtype=dtype, kv_heads=kv_heads)

    @classmethod
    def opaque(cls, size: int) -> "RowFormat":
        """Bytes that only the model understands; a multiple of four."""
        return cls(width=size, value_width=0, dtype=OPAQUE)

    @classmethod
    def fp8(cls, latent: int, rest: int, *, power_scales: bool = False) -> "RowFormat":
        """FlashMLA's layout: e4m3 latents, a float32 scale for each 128 of them, bfloat16 rest.

        Latents that are not in whole blocks of 128 get the largest blocks that divide both.

        Args:
            latent: numbers that attention sums up; quantised.
            rest: numbers after them.
            power_scales: whether scales are powers of two.
        """
        check_whole("latent", latent)
        group = math.gcd(latent, MOST_SCALED)
        scaled = ScaledRow(
            quantised=latent, group=group, scale="float32", rest=rest, power_scales=power_scales
        )
        return cls(width=latent + rest, value_width=latent, dtype=scaled)

    @property
    def name(self) -> str:
        """The dtype, or "fp8" or "fp4"."""
        numbers = self.dtype if isinstance(self.dtype, str) else self.dtype.numbers
        return {"e4m3": FP8, "e2m1": FP4}.get(numbers, numbers)

    @property
    def parts(self) -> int:
        """How many heads have numbers of their own in a row; 1 where all share them."""
        return 1 if self.kv_heads is None else self.kv_heads

    @property
    def query_width(self) -> int:
        """Numbers in a query: those of a key, which is the whole row where all heads share it."""
        if self.kv_heads is None:
            return self.width
        return self.width // self.kv_heads - self.value_width

    @property
    def words(self) -> int:
        """int32 words in a row."""
        if isinstance(self.dtype, ScaledRow):
            return self.dtype.words
        return words_of(self.width, jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Rows that a layer keeps of a request on the device, for itself, beside the records.

    Attributes:
        width: numbers in a row; words of it, where attention reads it.
        dtype: of the numbers; "int32" for words.
        row: format of a row that attention reads; None: that of the geometry.
        span: how many of the newest positions are read, a row each; None: rows of all.
        rate: positions per row, where there are rows of all.
    """

    width: int
    dtype: str
    row: RowFormat | None = None
    span: int | None = None
    rate: int = 1

    def rows(self, capacity: int, queries: int) -> int:
        """How many rows there are for a request.

        Of the newest positions a ring: whatever is written for `queries` positions overwrites only
        what none of them reads, so rows of rejected positions leave no trace.
        """
        return max(1, capacity // self.rate) if self.span is None else self.span - 1 + queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """Blocks of records that the first selection from a pool leaves to the others.

    The score of a block is the best one of its records; the newest block is always among them.
    Source: DeepSeek-V4.1 (two-level selection).

    Attributes:
        block: records in a block.
        count: blocks that are left to a query.
    """

    block: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a model needs of a hierarchy; every served model states it.

    A model that compresses its history has a record for every so many positions, complete with the
    last of them, and record numbers take the place of positions wherever records are meant.

    Attributes:
        row: format of a row, the same in every layer.
        layers_per_pool: how many layers share each pool, in order. GLM-5.3: 1, 1, then 19 times 4.
            DeepSeek-V4: 1 each, the layers between them have no rows in records.
        top_k: how many records a query selects, at most where the model itself selects.
        index_width: numbers in an index key; 0 where the model itself selects.
        index_dtype: dtype of the index keys, "float32" or "bfloat16"; or SCALED_KEYS or
            PACKED_KEYS.
        scale: factor of the attention logits. GLM-5.x: 256**-0.5. 1 for rows that are bytes.
        index_power_scales: whether the scales of SCALED_KEYS are powers of two.
        rates: positions per record of each pool; empty: 1. DeepSeek-V4: 4 each; V4.1: 2, 2, 2, 1.
        kept: what else the layers of each pool keep; empty: nothing.
        candidates: what the first selection from each pool leaves to others; None or empty: all.
        group_layers: how many layers run with each pool; empty: those that share it.
        feature_width: numbers that a drafter reads of a layer; None: the whole residual stream.
    """

    row: RowFormat
    layers_per_pool: tuple[int, ...]
    top_k: int
    index_width: int = 0
    index_dtype: str = "float32"
    scale: float
    index_power_scales: bool = False
    rates: tuple[int, ...] = ()
    kept: tuple[tuple[Kept, ...], ...] = ()
    candidates: tuple[Candidates | None, ...] = ()
    group_layers: tuple[int, ...] = ()
    feature_width: int | None = None

    def __post_init__(self) -> None:
        """Refuse groups without layers, and selections of nothing; a list of groups will do."""
        if isinstance(self.layers_per_pool, list):
            object.__setattr__(self, "layers_per_pool", tuple(self.layers_per_pool))
        if not isinstance(self.row, RowFormat):
            raise UserError(f"row is {self.row!r}; it must be a RowFormat")
        check_groups(self.layers_per_pool)
        check_whole("top_k", self.top_k)
        check_whole("index_width", self.index_width, least=0)
        check_number("scale", self.scale)
        if self.index_dtype not in KEY_DTYPES:
            raise UserError(f"index_dtype is {self.index_dtype!r}; use one of {KEY_DTYPES}")
        if self.index_width and self.key_bytes % WORD_BYTES:
            what = f"an index key of {self.index_width} x {self.index_dtype}"
            raise UserError(f"{what} is not whole words of {WORD_BYTES} bytes; pad it")

    @property
    def pools(self) -> int:
        """Number of pools."""
        return len(self.layers_per_pool)

    @property
    def index_format(self) -> str:
        """The dtype of the index keys, or "fp8" or "fp4"."""
        return {SCALED_KEYS: FP8, PACKED_KEYS: FP4}.get(self.index_dtype, self.index_dtype)

    @property
    def key_bytes(self) -> int:
        """Bytes of an index key, with its scale."""
        if self.index_dtype == PACKED_KEYS:
            return packed_format(self.index_width).bytes
        numbers = self.index_width * jnp.dtype(self.index_dtype).itemsize
        return numbers + (WORD_BYTES if self.index_dtype == SCALED_KEYS else 0)

    @property
    def position_bytes(self) -> float:
        """Bytes that a position adds: to records, index keys, and what else is kept of all of them.

        Without what fills up records and rows.
        """
        records = sum(
            (layers * self.row.words * WORD_BYTES + self.key_bytes) / self.rate(pool)
            for pool, layers in enumerate(self.layers_per_pool)
        )
        every = (kept for pool in self.kept for kept in pool if kept.span is None)
        words = lambda kept: kept.row.words if kept.row else kept.width
        beside = sum(words(kept) * jnp.dtype(kept.dtype).itemsize / kept.rate for kept in every)
        return records + beside

    def rate(self, pool: int) -> int:
        """Positions per record of a pool."""
        return self.rates[pool] if self.rates else 1

    @property
    def whole(self) -> int:
        """Positions that make whole records in every pool, at least."""
        return math.lcm(*self.rates)

    def fresh(self, pool: int, queries: int) -> int:
        """Most records of a pool that so many new positions complete."""
        return -(-queries // self.rate(pool))

    def check_movable(self, what: str) -> None:
        """Refuse what takes the history of a request elsewhere, where it is more than its records.

        Raises:
            UserError: what cannot be done, `what` with this model.
        """
        if self.kept:
            raise UserError(
                f"{what} is not possible with this model: beside records and index keys its layers "
                "keep windows and unfinished entries, which stay in the request's row"
            )

    def kept_of(self, pool: int) -> tuple[Kept, ...]:
        """What the layers of one pool keep."""
        return self.kept[pool] if self.kept else ()

    def candidates_of(self, pool: int) -> Candidates | None:
        """What the first selection from one pool leaves to the others."""
        return self.candidates[pool] if self.candidates else None
