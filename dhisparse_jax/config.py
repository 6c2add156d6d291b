"""Sizes of a hierarchy. Frozen and hashable, so equal configurations never retrace."""

import dataclasses
import functools
from enum import StrEnum

from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.possible import check_whole
from pallas_kernels.common.record_layout import RecordLayout, record_layout
from pallas_kernels.common.rows import WORD_BYTES

MAX_PAGE_SLOTS = 16
"""Most slots of a page: few enough that a page is soon given away, and soon full."""

GHOST_PAGES = 4
"""Pages' worth of evictions that adaptive residency remembers of every request and pool."""


class Policy(StrEnum):
    """How budgets are set; everything else is the same code.

    Attributes:
        RESIDENT: every record has a slot.
        FIXED: every request has the same slots at every load.
        ADAPTIVE: slots go to the requests and pools where they save most fetches.
    """

    RESIDENT = "resident"
    FIXED = "fixed"
    ADAPTIVE = "adaptive"


def usual_tail(queries: int) -> int:
    """Positions of a tail for steps of so many queries: those of two steps, and at least 16."""
    return max(16, 2 * queries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HierarchyConfig:
    """Sizes of the state.

    Attributes:
        geometry: what the model needs.
        policy: how budgets are set.
        requests: request rows (R), of each device if there are several.
        capacity: positions per request (C).
        queries: verify queries per request and step (T); 1 without a draft.
        hot_rows: hot slots per request and pool, on average over the requests.
        tail: length of the tail ring, at least 2 T.
        moves_per_step: most pages that adaptive residency moves per hot pool and step.
        host_page: positions in a page of host memory.
        host_pages: pages of host memory, each with room in every pool; None: as many as all rows
            take that use their whole capacity.
        record_layout: how records lie in memory; by default as the platform wants them.
        record_selections: keep what a step selects, so that it can be recorded.

    Examples:
        GLM-5.3's 78 layers in bfloat16, for four requests of 100,000 tokens:

        >>> from dhisparse_jax import Geometry, HierarchyConfig, Policy, RowFormat
        >>> geometry = Geometry(
        ...     row=RowFormat.mla(512, 64, "bfloat16"),
        ...     layers_per_pool=(1, 1, *19 * (4,)),
        ...     top_k=2048,
        ...     scale=256**-0.5,
        ... )
        >>> sum(geometry.layers_per_pool), geometry.pools
        (78, 21)
        >>> cfg = HierarchyConfig(
        ...     geometry=geometry,
        ...     policy=Policy.ADAPTIVE,
        ...     requests=4,
        ...     capacity=100_000,
        ...     hot_rows=8192,
        ... )
        >>> cfg.record_bytes(0), cfg.record_bytes(2)  # one row, and those of four layers
        (1152, 4608)
        >>> cfg.page_slots
        16
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
    record_layout: RecordLayout = dataclasses.field(default_factory=record_layout)
    record_selections: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work; a policy may be given by its name."""
        try:
            object.__setattr__(self, "policy", Policy(self.policy))
        except ValueError:
            names = ", ".join(policy.value for policy in Policy)
            raise UserError(f"unknown policy {self.policy!r}; use one of {names}") from None
        if not isinstance(self.geometry, Geometry):
            raise UserError(f"geometry is {self.geometry!r}; it must be a Geometry")
        for name in ("requests", "capacity", "queries", "hot_rows", "host_page", "tail"):
            check_whole(name, getattr(self, name))
        check_whole("moves_per_step", self.moves_per_step, least=0)
        check_whole("host_page_count", self.host_page_count)
        check_whole("positions in host memory", self.host_page_count * self.host_page)
        needed = self.geometry.top_k * max(self.geometry.rates, default=1)
        if needed > self.capacity:
            raise UserError(
                f"the model selects {needed} positions, but the capacity is {self.capacity}; raise "
                f"the capacity to at least {needed}"
            )
        for rate in self.geometry.rates:
            if self.host_page % rate:
                raise UserError(
                    f"host_page is {self.host_page}, but a record stands for {rate} "
                    "positions; a page holds whole records"
                )
        if self.queries > self.capacity:
            raise UserError(
                f"a step of {self.queries} queries goes beyond a capacity of {self.capacity}; "
                "raise the capacity"
            )
        if self.tail < 2 * self.queries:
            raise UserError(
                f"a tail of {self.tail} cannot hold {self.queries} verify queries; "
                f"it must be at least {2 * self.queries}"
            )

    @property
    def pools(self) -> int:
        """Number of pools."""
        return self.geometry.pools

    def records(self, pool: int) -> int:
        """Records of a request that uses its whole capacity, in one pool."""
        return self.capacity // self.geometry.rate(pool)

    def fresh(self, pool: int) -> int:
        """Most records of one pool that one step completes for a request."""
        return self.geometry.fresh(pool, self.queries)

    def page_records(self, pool: int) -> int:
        """Records of one pool in a host page."""
        return self.host_page // self.geometry.rate(pool)

    @functools.cached_property
    def page_slots(self) -> int:
        """Slots per page: a power of two that divides the budget, so that no slot is lost."""
        if all(self._keeps_all(pool) for pool in range(self.pools)):
            return MAX_PAGE_SLOTS
        return min(MAX_PAGE_SLOTS, self.hot_rows & -self.hot_rows)

    def _keeps_all(self, pool: int) -> bool:
        """Whether a pool has a slot for every record."""
        return self.policy is Policy.RESIDENT or self.hot_rows >= self.records(pool)

    def hot_slots(self, pool: int) -> int:
        """Hot slots per request in a pool, on average: `hot_rows`, or all records if that is less.

        `resident` always has a slot for every record. Those are rounded up to whole pages.
        """
        whole = self.max_pages(pool) * self.page_slots
        return whole if self._keeps_all(pool) else self.hot_rows

    def share_pages(self, pool: int) -> int:
        """Pages per request in a pool, on average: what `fixed` and `resident` always hold."""
        return self.hot_slots(pool) // self.page_slots

    def max_pages(self, pool: int) -> int:
        """Pages that one request can use at most in one pool: its whole history."""
        return -(-self.records(pool) // self.page_slots)

    @property
    def working_set(self) -> int:
        """Records that one selection of a step can need of one pool and request at most."""
        return self.queries * self.geometry.top_k

    def floor_pages(self, pool: int) -> int:
        """Pages of a pool that an active request never falls below."""
        if self.policy is not Policy.ADAPTIVE:
            return self.share_pages(pool)
        return min(self.share_pages(pool), -(-self.working_set // self.page_slots))

    def staging(self, hot: int) -> int:
        """Staging slots per request: what no floor can hold of the largest working set."""
        floor = min(self.floor_pages(pool) for pool in self.hot_pools[hot])
        return max(0, self.working_set - floor * self.page_slots)

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
        words = sum(
            self.page_records(pool) * (self.record_words(pool) + self.key_words)
            for pool in range(self.pools)
        )
        return words * WORD_BYTES

    def host_rows(self, pool: int) -> int:
        """Records of one pool that host memory has room for."""
        return self.host_page_count * self.page_records(pool)

    @property
    def ghosts(self) -> int:
        """Evicted positions that are remembered per request and pool; only `adaptive` asks."""
        return GHOST_PAGES * self.page_slots if self.policy is Policy.ADAPTIVE else 0

    @property
    def recorded(self) -> int:
        """Selected positions per query that a state keeps."""
        return self.geometry.top_k if self.record_selections else 0

    def record_words(self, pool: int) -> int:
        """int32 words of a record: one row per layer, padded as the layout of records says."""
        layers = self.geometry.layers_per_pool[pool]
        return self.record_layout.record_words(layers, self.geometry.row.words)

    def record_shape(self, pool: int) -> tuple[int, ...]:
        """Dimensions of a record."""
        return self.record_layout.shape(self.record_words(pool))

    def record_bytes(self, pool: int) -> int:
        """Bytes of a record, padding included."""
        return WORD_BYTES * self.record_words(pool)

    @property
    def key_words(self) -> int:
        """int32 words of an index key in host memory, padded as a record is."""
        words = self.geometry.key_bytes // WORD_BYTES
        return self.record_layout.record_words(1, words) if words else 0

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Dimensions of an index key in host memory."""
        return self.record_layout.shape(self.key_words)

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
