"""Sizes of a hierarchy. Frozen and hashable, so equal configurations never retrace."""

import dataclasses
import functools
import math
from enum import StrEnum

import jax.numpy as jnp

from dhisparse_jax.errors import UserError
from pallas_kernels.common.rows import WORD_BYTES, words_of
from pallas_kernels.common.scaled_rows import ScaledRow

RECORD_ALIGNMENT = 128
"""Bytes: TMA wants 128-byte aligned destinations, so records are padded to it."""

MAX_PAGE_SLOTS = 16

MOST_SCALED = 128
"""Numbers of an fp8 row that share a scale, at most."""

FP8 = "fp8"
"""What formats are called that have numbers of 8 bits, with scales."""

SCALED_KEYS = "float8_e4m3fn"
"""The `index_dtype` of index keys in fp8, which have a float32 scale each."""

GHOST_PAGES = 4
"""Pages' worth of evictions that adaptive residency remembers of every request and pool."""


class Policy(StrEnum):
    """How budgets are set; everything else is the same code."""

    RESIDENT = "resident"
    FIXED = "fixed"
    ADAPTIVE = "adaptive"


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """What one token keeps in one layer: `width` numbers of `dtype`.

    Attributes:
        width: numbers in a row. GLM-5.x: 512 latent + 64 rope.
        value_width: leading numbers that attention sums up. GLM-5.x: 512.
        dtype: name of the dtype, "float32" or "bfloat16"; or the format of rows in two precisions.
    """

    width: int
    value_width: int
    dtype: str | ScaledRow

    def __post_init__(self) -> None:
        """Refuse a format of rows of another width."""
        if isinstance(self.dtype, ScaledRow) and self.dtype.width != self.width:
            raise UserError(f"rows of {self.width} numbers have a format for {self.dtype.width}")

    @classmethod
    def fp8(cls, latent: int, rest: int, *, power_scales: bool = False) -> "RowFormat":
        """FlashMLA's layout: e4m3 latents, a float32 scale for each 128 of them, bfloat16 rest.

        Latents that are not in whole blocks of 128 get the largest blocks that divide both.

        Args:
            latent: numbers that attention sums up; quantised.
            rest: numbers after them.
            power_scales: whether scales are powers of two.
        """
        scaled = ScaledRow(
            quantised=latent,
            group=math.gcd(latent, MOST_SCALED),
            scale="float32",
            rest=rest,
            power_scales=power_scales,
        )
        return cls(width=latent + rest, value_width=latent, dtype=scaled)

    @property
    def name(self) -> str:
        """The dtype, or "fp8"."""
        return self.dtype if isinstance(self.dtype, str) else FP8

    @property
    def words(self) -> int:
        """int32 words in a row."""
        if isinstance(self.dtype, ScaledRow):
            return self.dtype.words
        return words_of(self.width, jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a model needs of a hierarchy; every served model states it.

    Attributes:
        row: format of a row, the same in every layer.
        layers_per_pool: how many layers share each pool, in order. GLM-5.3: 1, 1, then 19 times 4.
        top_k: how many positions a query selects.
        index_width: numbers in an index key.
        index_dtype: dtype of the index keys, "float32" or "bfloat16"; or SCALED_KEYS.
        scale: factor of the attention logits. GLM-5.x: 256**-0.5.
        index_power_scales: whether the scales of SCALED_KEYS are powers of two.
    """

    row: RowFormat
    layers_per_pool: tuple[int, ...]
    top_k: int
    index_width: int
    index_dtype: str
    scale: float
    index_power_scales: bool = False

    @property
    def index_format(self) -> str:
        """The dtype of the index keys, or "fp8"."""
        return FP8 if self.index_dtype == SCALED_KEYS else self.index_dtype

    @property
    def key_bytes(self) -> int:
        """Bytes of an index key, with its scale."""
        numbers = self.index_width * jnp.dtype(self.index_dtype).itemsize
        return numbers + (WORD_BYTES if self.index_dtype == SCALED_KEYS else 0)

    @property
    def position_bytes(self) -> int:
        """Bytes of all rows and index keys of one position, without what fills up records."""
        rows = sum(self.layers_per_pool) * self.row.words * WORD_BYTES
        return rows + len(self.layers_per_pool) * self.key_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HierarchyConfig:
    """Sizes of the state.

    Attributes:
        geometry: what the model needs.
        policy: how budgets are set.
        requests: request rows (R).
        capacity: positions per request (C).
        queries: verify queries per request and step (T); 1 without a draft.
        hot_rows: hot slots per request and pool, on average over the requests.
        tail: length of the tail ring, at least 2 T.
        moves_per_step: most pages that adaptive residency moves per hot pool and step.
        host_page: positions in a page of host memory.
        host_pages: pages of host memory, each with room in every pool; None: as many as all rows
            take that use their whole capacity.
        record_selections: keep what a step selects, so that it can be recorded.
    """

    geometry: Geometry
    policy: Policy
    requests: int
    capacity: int
    queries: int = 1
    hot_rows: int
    tail: int = 16
    moves_per_step: int = 4
    host_page: int = 16
    host_pages: int | None = None
    record_selections: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work; a policy may be given by its name."""
        try:
            object.__setattr__(self, "policy", Policy(self.policy))
        except ValueError:
            names = ", ".join(policy.value for policy in Policy)
            raise UserError(f"unknown policy {self.policy!r}; use one of {names}") from None
        for name in ("requests", "capacity", "queries", "hot_rows", "host_page", "host_page_count"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.geometry.top_k > self.capacity:
            raise UserError(
                f"the model selects {self.geometry.top_k} positions, but the capacity is "
                f"{self.capacity}; raise the capacity to at least {self.geometry.top_k}"
            )
        if self.tail < 2 * self.queries:
            raise UserError(
                f"a tail of {self.tail} cannot hold {self.queries} verify queries; "
                f"it must be at least {2 * self.queries}"
            )

    @property
    def pools(self) -> int:
        """Number of pools."""
        return len(self.geometry.layers_per_pool)

    @property
    def page_slots(self) -> int:
        """Slots per page: a power of two that divides the budget, so that no slot is lost."""
        return min(MAX_PAGE_SLOTS, self.hot_slots & -self.hot_slots)

    @property
    def hot_slots(self) -> int:
        """Hot slots per request and pool, on average: `hot_rows`, or the capacity if that is less.

        `resident` always has the whole capacity, rounded up to whole pages.
        """
        if self.policy is Policy.RESIDENT or self.hot_rows >= self.capacity:
            return -(-self.capacity // MAX_PAGE_SLOTS) * MAX_PAGE_SLOTS
        return self.hot_rows

    @property
    def share_pages(self) -> int:
        """Pages per request and pool, on average: what `fixed` and `resident` always hold."""
        return self.hot_slots // self.page_slots

    @property
    def max_pages(self) -> int:
        """Pages that one request can use at most in one pool: its whole history."""
        return -(-self.capacity // self.page_slots)

    @property
    def working_set(self) -> int:
        """Records that one step can need of one pool and request at most."""
        return self.queries * self.geometry.top_k

    @property
    def floor_pages(self) -> int:
        """Pages that an active request never falls below."""
        if self.policy is not Policy.ADAPTIVE:
            return self.share_pages
        return min(self.share_pages, -(-self.working_set // self.page_slots))

    @property
    def staging(self) -> int:
        """Staging slots per request: what the floor cannot hold of the largest working set."""
        return max(0, self.working_set - self.floor_pages * self.page_slots)

    @property
    def row_pages(self) -> int:
        """Host pages of a request that uses its whole capacity."""
        return -(-self.capacity // self.host_page)

    @property
    def host_page_count(self) -> int:
        """Host pages that there are."""
        return self.requests * self.row_pages if self.host_pages is None else self.host_pages

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a host page in all pools, index keys included."""
        words = sum(self.record_words(pool) + self.key_words for pool in range(self.pools))
        return self.host_page * words * WORD_BYTES

    @property
    def host_rows(self) -> int:
        """Positions that host memory has room for."""
        return self.host_page_count * self.host_page

    @property
    def ghosts(self) -> int:
        """Evicted positions that are remembered per request and pool; only `adaptive` asks."""
        return GHOST_PAGES * self.page_slots if self.policy is Policy.ADAPTIVE else 0

    @property
    def recorded(self) -> int:
        """Selected positions per query that a state keeps."""
        return self.geometry.top_k if self.record_selections else 0

    def record_words(self, pool: int) -> int:
        """int32 words of a record: one row per layer, padded to 128 bytes."""
        return _aligned(self.geometry.layers_per_pool[pool] * self.geometry.row.words)

    @property
    def key_words(self) -> int:
        """int32 words of an index key in host memory, padded as a record is."""
        geometry = self.geometry
        numbers = words_of(geometry.index_width, jnp.dtype(geometry.index_dtype))
        return _aligned(numbers + (geometry.index_dtype == SCALED_KEYS))

    @functools.cached_property
    def hot_pools(self) -> tuple[tuple[int, ...], ...]:
        """The pools behind each hot pool: those with the same record size share one."""
        sizes = [self.record_words(pool) for pool in range(self.pools)]
        return tuple(
            tuple(pool for pool in range(self.pools) if sizes[pool] == size)
            for size in sorted(set(sizes))
        )

    def hot_pool_of(self, pool: int) -> tuple[int, int]:
        """Which hot pool holds `pool`, and its place among the pools there."""
        for number, members in enumerate(self.hot_pools):
            if pool in members:
                return number, members.index(pool)
        raise IndexError(f"there is no pool {pool}; there are {self.pools}")


def _aligned(words: int) -> int:
    """Words, padded to whole units of RECORD_ALIGNMENT."""
    unit = RECORD_ALIGNMENT // WORD_BYTES
    return -(-words // unit) * unit
