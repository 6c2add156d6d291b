"""Interrupts that cannot get lost.

Python drops an exception that is raised inside a callback of a compiled library, and a program
spends seconds in those while it compiles. So an interrupt is also noted, to be looked at later.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Note SIGINT and SIGTERM in the body, and raise KeyboardInterrupt for each.

    Yields:
        A check to call now and then: raises KeyboardInterrupt if one was noted and got lost.
    """
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check  # only the main thread is told of signals
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
