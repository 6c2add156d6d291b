"""Who has a row, whether another request fits beside them, and what is set aside for the others.

Index keys, tails and the floor of the hot pages come with a row: there are as many as rows of each.
What a request holds above its floor is optional and comes back as soon as somebody needs it, so
admission never waits for memory that can be reclaimed.
"""

import dataclasses
from collections.abc import Iterable

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.memory import free_memory_bytes


@dataclasses.dataclass
class Ledger:
    """Rows of one device, and bytes that are set aside for requests without one.

    Attributes:
        rows: how many there are.
        parking: host bytes for requests outside of rows and host pages.
        held: numbers of the requests that have a row.
        parked: bytes by number of a request that waits, which it may need at any time.
    """

    rows: int
    parking: int
    held: set[int] = dataclasses.field(default_factory=set)
    parked: dict[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, cfg: HierarchyConfig, parking: int | None = None, devices: int = 1) -> "Ledger":
        """An empty ledger of one of some devices that share host memory.

        By default, all that is free of it can be parked in, and not only what can be pinned.
        Nothing can where a history is more than its records: such a request stays in its row.
        """
        if cfg.geometry.kept:
            parking = 0
        every = free_memory_bytes() if parking is None else parking
        return cls(cfg.requests, every // devices)

    @property
    def idle(self) -> bool:
        """Nobody holds anything."""
        return not self.held and not self.parked

    def fits(self, without: Iterable[int] = ()) -> bool:
        """Whether one more request fits, once those of `without` have left their rows."""
        return len(self.held.difference(without)) < self.rows

    def enter(self, number: int) -> None:
        """A request takes a row; what was set aside for it is free."""
        self.held.add(number)
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
        self.held.discard(number)
        self.parked.pop(number, None)
