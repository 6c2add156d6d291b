"""Interrupts that neither get lost nor break a step in the middle.

An exception that a signal raises can come between a step that has consumed the state and the line
that keeps the new one; and Python drops it inside a callback of a compiled library, where a program
spends seconds while it compiles. So the first signal is only noted, to be looked at between steps.
The second one is raised wherever it comes.

`timeout`, and other programs that start this one, signal it and then the group that it is in: the
same signal again at once is not a second one.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType

INTERRUPTED = 130
"""The exit code of what a signal ended, as shells have it for SIGINT."""
ECHO_SECONDS = 0.5
"""How soon the same signal again is still the first one; nobody wants to stop at once so soon."""

NOTICE = b"\nstopping after this step; once more stops at once\n"


@contextlib.contextmanager
def interrupts() -> Generator[Callable[[], None], None, None]:
    """Note the first SIGINT or SIGTERM in the body, and raise KeyboardInterrupt for the second.

    Yields:
        A check to call between steps: raises KeyboardInterrupt if a signal was noted.
    """
    seen: list[tuple[int, float]] = []

    def note(number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if seen and (number != seen[0][0] or now > seen[0][1] + ECHO_SECONDS):
            raise KeyboardInterrupt
        if seen:
            return
        seen.append((number, now))
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
