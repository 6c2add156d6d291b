"""Who wants to know of everything that changes a hierarchy, in the order in which it happens."""

from dhisparse_jax.step import StepOutput


class Watcher:
    """Is told of every change after its launch; here, it does nothing about it.

    The device may not have done it yet: to read an array waits until it has.
    """

    def joined(self, row: int, length: int) -> None:
        """A request has `length` positions in the row, and its pages."""

    def admitted(self, row: int, pool: int) -> None:
        """Its newest positions fill the pages of a pool."""

    def left(self, row: int) -> None:
        """The row is free."""

    def stepped(self, output: StepOutput) -> None:
        """A dispatch of decode steps; every leaf has a first axis of steps."""
