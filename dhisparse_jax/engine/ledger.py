"""What requests take while they have a row, and whether another one fits beside them.

Hot pages count by their floor: what a request holds above it is optional and comes back as soon as
somebody needs it, so admission never waits for memory that can be reclaimed.
"""

import dataclasses
import operator
from collections.abc import Iterable

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.memory import free_host_bytes
from dhisparse_jax.hierarchy import layout


@dataclasses.dataclass(frozen=True)
class Claim:
    """Amounts of everything that is handed out with a row.

    Attributes:
        index_keys: positions of the index keys.
        hot_pages: pages of all hot pools.
        tail_slots: slots of the tails of all pools.
    """

    index_keys: int = 0
    hot_pages: int = 0
    tail_slots: int = 0

    @property
    def amounts(self) -> tuple[int, int, int]:
        """All of them, in order."""
        return self.index_keys, self.hot_pages, self.tail_slots

    def __add__(self, other: "Claim") -> "Claim":
        """Sum, field by field."""
        return Claim(*map(operator.add, self.amounts, other.amounts))

    def __sub__(self, other: "Claim") -> "Claim":
        """Difference, field by field."""
        return Claim(*map(operator.sub, self.amounts, other.amounts))

    def within(self, other: "Claim") -> bool:
        """Whether no amount exceeds the other's."""
        return all(map(operator.le, self.amounts, other.amounts))


@dataclasses.dataclass
class Ledger:
    """Claims of the requests in rows, and bytes that are set aside for those without one.

    Attributes:
        total: what there is.
        claim: what a request takes: its row is its own, whatever its length.
        parking: host bytes for requests outside of rows and host pages.
        held: claims by request number.
        parked: bytes by number of a request that waits, which it may need at any time.
        used: sum of the claims.
    """

    total: Claim
    claim: Claim
    parking: int
    held: dict[int, Claim] = dataclasses.field(default_factory=dict)
    parked: dict[int, int] = dataclasses.field(default_factory=dict)
    used: Claim = Claim()

    @classmethod
    def of(cls, cfg: HierarchyConfig, parking: int | None = None, devices: int = 1) -> "Ledger":
        """An empty ledger of one of some devices that share host memory.

        By default, all that is free of it can be parked in. Nothing can where a history is more
        than its records: such a request stays in its row.
        """
        pages = sum(layout.pages(cfg, number) for number in range(len(cfg.hot_pools)))
        positions = cfg.requests * cfg.capacity
        total = Claim(positions, pages, cfg.requests * cfg.pools * cfg.tail)
        floor = sum(cfg.floor_pages(pool) for pool in range(cfg.pools))
        claim = Claim(cfg.capacity, floor, cfg.pools * cfg.tail)
        if cfg.geometry.kept:
            parking = 0
        every = free_host_bytes() if parking is None else parking
        return cls(total, claim, every // devices)

    @property
    def idle(self) -> bool:
        """Nobody holds anything."""
        return not self.held and not self.parked and self.used == Claim()

    def fits(self, without: Iterable[int] = ()) -> bool:
        """Whether one more request fits, once those of `without` have left their rows."""
        freed = sum((self.held[number] for number in without), Claim())
        return (self.used - freed + self.claim).within(self.total)

    def enter(self, number: int) -> None:
        """A request takes a row; what was set aside for it is free."""
        self.held[number] = self.claim
        self.used += self.claim
        self.parked.pop(number, None)

    def can_park(self, size: int) -> bool:
        """Whether `size` more bytes can be set aside."""
        return sum(self.parked.values()) + size <= self.parking

    def park(self, number: int, size: int) -> None:
        """A request leaves its row; so many bytes are set aside for it."""
        self.leave(number)
        self.parked[number] = size

    def leave(self, number: int) -> None:
        """A request ends, or goes back to where it had nothing."""
        self.used -= self.held.pop(number, Claim())
        self.parked.pop(number, None)
