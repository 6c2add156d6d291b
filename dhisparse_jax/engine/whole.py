"""Whether all work on a state was done to its end.

An exception can come between a program that has consumed the state and the line that keeps the new
one. The state is gone then, and no cleanup may touch it. So a note is made before the work and
crossed out behind it: it stays, wherever in between an exception came from.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from dhisparse_jax.errors import UserError

Piece = TypeVar("Piece")
"""What work gives while it goes on."""


class Whole:
    """A note of work that has begun; false where an exception broke it off, for good."""

    def __init__(self) -> None:
        self._at_work = False

    def __bool__(self) -> bool:
        """Whether nothing was broken off; to be asked between two pieces of work."""
        return not self._at_work

    def check(self) -> None:
        """Raises UserError where work was broken off."""
        if self._at_work:
            raise UserError(
                "the engine was interrupted in the middle of its work, and its state is lost; make "
                "a new one"
            )

    def __enter__(self) -> None:
        """Begin. Raises as `check`."""
        self.check()
        self._at_work = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """It is done if nothing was raised in the body, and not begun if it was refused."""
        self._at_work = kind is not None and not issubclass(kind, UserError)

    def between(self, work: Iterable[Piece]) -> Iterator[Piece]:
        """Hand on what `work` gives. What is raised, or done, between two of it breaks nothing.

        Raises:
            UserError: earlier work was broken off, also between two of them.
        """
        self.__enter__()
        for item in work:
            self.__exit__(None)
            yield item
            self.__enter__()
        self.__exit__(None)
