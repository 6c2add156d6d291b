"""Who wants to know of everything that changes a hierarchy, in the order in which it happens."""

from typing import Protocol

from dhisparse_jax.engine.output import Packed


class Watcher(Protocol):
    """Is told of every change after its launch.

    The device may not have done it yet: to read an array waits until it has.
    """

    def joined(self, row: int, length: int) -> None:
        """A request has `length` positions in the row, and its pages."""
        ...

    def admitted(self, row: int, pool: int) -> None:
        """Its newest positions fill the pages of a pool."""
        ...

    def left(self, row: int) -> None:
        """The row is free."""
        ...

    def stepped(self, output: Packed) -> None:
        """A dispatch of decode steps; its output can be read until the one after the next."""
        ...


class Nobody:
    """A watcher that does not care."""

    def joined(self, row: int, length: int) -> None:
        """See `Watcher`."""

    def admitted(self, row: int, pool: int) -> None:
        """See `Watcher`."""

    def left(self, row: int) -> None:
        """See `Watcher`."""

    def stepped(self, output: Packed) -> None:
        """See `Watcher`."""
