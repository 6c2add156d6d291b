"""Requests that arrive over time, given to an engine in real or in virtual time."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.events import Event
from dhisparse_jax.engine.request import Request


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request that arrives `at` seconds after the start.

    Attributes:
        at: seconds after the start.
        request: what is asked for.
    """

    at: float
    request: Request


@dataclasses.dataclass(frozen=True)
class Arrived:
    """Request number `request` was submitted; it had arrived `at` seconds after the start.

    Attributes:
        request: its number.
        at: seconds after the start.
    """

    request: int
    at: float


class Clock:
    """Seconds since the start.

    Args:
        virtual: skip the time in which there is nothing to do; work takes what it takes.
        now: where seconds come from.
        sleep: how to wait in real time.
    """

    def __init__(
        self,
        virtual: bool,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._virtual, self._now, self._sleep = virtual, now, sleep
        self._start = now()

    def now(self) -> float:
        """Seconds since the start, skipped ones included."""
        return self._now() - self._start

    def wait_until(self, at: float) -> None:
        """Let the time come."""
        left = max(at - self.now(), 0.0)
        if self._virtual:
            self._start -= left
        else:
            self._sleep(left)


def warm_up(engine: Engine) -> None:
    """Compile everything that a replay needs, so that no request waits for it.

    The context is never too short for it: it holds a prompt and a new token at least.
    """
    new = 2 if engine.cfg.capacity > 2 else 1
    list(engine.run([Request(name="warm-up", prompt=(0,), max_new_tokens=new)]))


def replay(engine: Engine, arrivals: Sequence[Arrival], clock: Clock) -> Iterator[Event | Arrived]:
    """Submit every request when its time has come, and work until all have ended.

    Draws depend on the seed of a request alone, so its tokens do not depend on the load. Stopping
    the iteration early cancels what is left.

    Raises:
        UserError: a request can never run.
    """
    queue, numbers = deque(sorted(arrivals, key=lambda arrival: arrival.at)), list[int]()
    try:
        while queue or not engine.idle:
            while queue and queue[0].at <= clock.now():
                arrival = queue.popleft()
                numbers.append(engine.submit(arrival.request))
                yield Arrived(numbers[-1], arrival.at)
            if engine.idle:
                clock.wait_until(queue[0].at)
            else:
                yield from engine.advance()
    finally:
        for number in numbers:
            engine.cancel(number)
