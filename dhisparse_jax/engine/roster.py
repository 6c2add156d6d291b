"""Who is in which row, who waits, and who makes room for whom."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from dhisparse_jax.engine.exchange import (
    Paged,
    capture,
    page_in,
    page_out,
    restore,
    session_bytes,
)
from dhisparse_jax.engine.job import Job
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.session import Session
from dhisparse_jax.engine.sharing import Holding


class _Room(NamedTuple):
    """Who makes room for a request.

    Attributes:
        rows: these leave their rows.
        pages: these leave their host pages, too or by now.
    """

    rows: tuple[Job, ...]
    pages: tuple[Job, ...]


class Roster:
    """The requests of an engine: in rows, or in the queue.

    Args:
        machine: whose rows they are.
        ledger: what they hold.

    Attributes:
        jobs: all of them, by number.
        waiting: the queue, by rank.
        rows: who is in each row.
    """

    def __init__(self, machine: Machine, ledger: Ledger) -> None:
        self._machine, self._ledger = machine, ledger
        self._tickets = 0
        self.jobs: dict[int, Job] = {}
        self.waiting: list[Job] = []
        self.rows: list[Job | None] = [None] * machine.cfg.requests

    def __iter__(self) -> Iterator[Job]:
        """Those in rows, by row."""
        return (job for job in tuple(self.rows) if job is not None)

    def queue(self, job: Job, priority: int) -> None:
        """Put a request behind those of its priority."""
        self._tickets += 1
        job.rank = (-priority, self._tickets)
        self.jobs[job.number] = job
        bisect.insort(self.waiting, job, key=_rank)

    def decoding(self) -> dict[int, Job]:
        """Those that the next step gives tokens to, by row."""
        return {row: job for row, job in enumerate(self.rows) if job is not None and job.decoding}

    def wanted(self, limit: int) -> bool:
        """Whether there is something for `entering` to do; changes nothing. Arguments as there."""
        if any(job.prefill is not None for job in self):
            return True
        return bool(self.waiting) and self._room(self.waiting[0], limit) is not None

    def entering(self, limit: int) -> Job | None:
        """The request in prefill, or the first in the queue if it can have a row now.

        One that comes back needs no prefill: it decodes at once.

        Args:
            limit: requests that may be in rows.
        """
        for job in self:
            if job.prefill is not None:
                return job
        room = self._room(self.waiting[0], limit) if self.waiting else None
        if room is None:
            return None
        for victim in room.rows:
            self.park(victim)
        for victim in room.pages:
            self._take_out_of_pages(victim)
        job = self.waiting.pop(0)
        job.row = self.rows.index(None)
        self.rows[job.row] = job
        self._ledger.enter(job.number)
        self._machine.quiet(job.row)
        self._enter(job, job.row)
        return job

    def park(self, job: Job) -> bool:
        """Take a request out of its row into the queue. False where that cannot be done."""
        size = self._parked_bytes(job)
        if job.row is None or job.reason is not None or not self._ledger.can_park(size):
            return False
        self._leave(job, job.row, keep=True)
        self._ledger.park(job.number, size)
        bisect.insort(self.waiting, job, key=_rank)
        return True

    def yield_turn(self, job: Job) -> bool:
        """Take a request out of its row, behind those of its priority. False as for `park`."""
        if not self.park(job):
            return False
        self.waiting.remove(job)
        self.queue(job, -job.rank[0])
        return True

    def end(self, job: Job) -> None:
        """Forget a request, wherever it is."""
        del self.jobs[job.number]
        if job.row is None:
            self.waiting.remove(job)
            if isinstance(job.outside, Paged):
                self._machine.sharing.release(job.outside.holding)
        else:
            self._leave(job, job.row, keep=False)
        self._ledger.leave(job.number)

    def _room(self, job: Job, limit: int) -> _Room | None:
        """Who gives what up so that a waiting request can enter now; None: it has to wait.

        As few as possible leave their rows, only of lower priority, and the last of them first.
        """
        running = list(self)
        lower = [other for other in running if other.rank[0] > job.rank[0] and not other.reason]
        lower.sort(key=_rank, reverse=True)
        for count in range(len(lower) + 1):
            victims = tuple(lower[:count])
            size = sum(self._parked_bytes(victim) for victim in victims)
            rows = len(running) - count < limit and self._ledger.can_park(size)
            if rows and self._ledger.fits([victim.number for victim in victims]):
                pages = self._pages_for(job, victims)
                if pages is not None:
                    return _Room(victims, pages)
        return None

    def _pages_for(self, job: Job, victims: tuple[Job, ...]) -> tuple[Job, ...] | None:
        """Who leaves host pages so that a request fits into them beside those that stay.

        None, where nobody can; else as few as possible of those without a row, the last first.
        """
        if isinstance(job.outside, Paged):
            return ()
        prompt = job.request.prompt if job.outside is None else ()
        sharing, positions = self._machine.sharing, job.request.end(self._machine.cfg.capacity)
        anew = [self._holding(victim) for victim in victims if victim.prefill is not None]
        begun = [victim for victim in victims if victim.prefill is None]
        others = [other for other in self.waiting if isinstance(other.outside, Paged)]
        others = sorted([*others, *begun], key=_rank, reverse=True)
        holdings = [self._holding(other) for other in others]
        fits = lambda count: sharing.fits(prompt, positions, [*anew, *holdings[:count]])
        if fits(0):
            return ()
        if not fits(len(others)):
            return None
        return tuple(others[: next(count for count in range(len(others) + 1) if fits(count))])

    def _holding(self, job: Job) -> Holding:
        if isinstance(job.outside, Paged):
            return job.outside.holding
        assert job.row is not None  # callers ask
        return self._machine.sharing.of(job.row)

    def _parked_bytes(self, job: Job) -> int:
        """What a request in a row may take outside of host pages; one in prefill starts anew.

        It is set aside as soon as a request leaves its row, so that whoever is first in the queue
        can always have the pages of those that wait behind.
        """
        return 0 if job.prefill is not None else session_bytes(self._machine, job.positions)

    def _take_out_of_pages(self, job: Job) -> None:
        """A request without a row gives its host pages up."""
        assert isinstance(job.outside, Paged)  # callers ask
        paged = job.outside
        job.outside = capture(self._machine, paged, job.request, job.draw, job.produced)
        self._machine.sharing.release(paged.holding)

    def _enter(self, job: Job, row: int) -> None:
        """Put a request into a row, or begin to."""
        machine, request = self._machine, job.request
        outside, job.outside = job.outside, None
        match outside:
            case Paged():
                page_in(machine, row, outside, request, job.draw, job.produced)
            case Session():
                restore(machine, row, outside)
            case None:
                positions = request.end(machine.cfg.capacity)
                entry = machine.sharing.enter(row, request.prompt, positions)
                job.prefill = machine.prefill(row, job.number, request.prompt, entry)

    def _leave(self, job: Job, row: int, *, keep: bool) -> None:
        """A request leaves its row, with its host pages if they are to be kept and it has begun."""
        if job.prefill is not None:
            job.prefill.close()
            job.prefill = None
            self._machine.leave(row)
        else:
            text = (*job.request.prompt, *job.produced)
            self._machine.sharing.has(row, text[:-1])  # the last token is not in the history
            if keep:
                job.outside = page_out(self._machine, row)
            else:
                self._machine.leave(row)
        self.rows[row] = None
        job.row = None


def _rank(job: Job) -> tuple[int, int]:
    return job.rank
