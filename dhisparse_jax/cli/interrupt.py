"""Interrupts that neither get lost nor break a step in the middle.

An exception that a signal raises can come between a step that has consumed the state and the line
that keeps the new one; and Python drops it inside a callback of a compiled library, where a program
spends seconds while it compiles. So the first signal is only noted, to be looked at between steps.
The second one is raised wherever it comes.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

INTERRUPTED = 130
"""The exit code of what a signal ended, as shells have it for SIGINT."""
NOTICE = b"\nstopping after this step; once more stops at once\n"


@contextlib.contextmanager
def interrupts() -> Generator[Callable[[], None], None, None]:
    """Note the first SIGINT or SIGTERM in the body, and raise KeyboardInterrupt for the second.

    Yields:
        A check to call between steps: raises KeyboardInterrupt if a signal was noted.
    """
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), NOTICE)  # a handler may not use buffered streams

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
