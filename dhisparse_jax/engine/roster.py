"""Who is in which row, who waits, and who makes room for whom."""

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dhisparse_jax.engine.elsewhere import Elsewhere
from dhisparse_jax.engine.exchange import (
    Paged,
    capture,
    page_in,
    page_out,
    restore,
    session_bytes,
)
from dhisparse_jax.engine.job import Job
from dhisparse_jax.engine.machine import Machine
from dhisparse_jax.engine.session import Session
from dhisparse_jax.engine.sharing import Holding
from dhisparse_jax.errors import UserError


class _Room(NamedTuple):
    """Who makes room for a request.

    Attributes:
        device: where.
        rows: these leave their rows.
        pages: these leave their host pages, too or by now.
    """

    device: int
    rows: tuple[Job, ...]
    pages: tuple[Job, ...]


class Roster:
    """The requests of an engine: in rows, or in the queue.

    Args:
        machines: whose rows they are, by device.

    Attributes:
        jobs: all of them, by number.
        waiting: the queue, by rank.
        rows: who is in each row.
    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines, self._each = machines, machines[0].cfg.requests
        self._tickets = 0
        self._spans = any(isinstance(machine, Elsewhere) for machine in machines)
        self.jobs: dict[int, Job] = {}
        self.waiting: list[Job] = []
        self.rows: list[Job | None] = [None] * (self._each * len(machines))

    def __iter__(self) -> Iterator[Job]:
        """Those in rows, by row."""
        return (job for job in tuple(self.rows) if job is not None)

    def place(self, job: Job) -> tuple[Machine, int]:
        """The machine that a request in a row is on, and its row there."""
        assert job.row is not None  # callers ask
        device, row = divmod(job.row, self._each)
        return self._machines[device], row

    def session(self, number: int) -> Session:
        """Everything that a request needs to go on; see `Engine.save`."""
        self._check_movable("a session")
        job = self.jobs.get(number)
        if job is None or job.reason is not None:
            raise UserError(f"there is no request {number} that could go on")
        if isinstance(job.outside, Session):
            return job.outside
        if job.home is None or job.prefill is not None:
            raise UserError(f"request {number} has not begun; submit it again instead")
        place = job.outside or self.place(job)[1]
        return capture(self._home(job), place, job.request, job.draw, job.produced)

    def _check_movable(self, what: str) -> None:
        if self._spans:
            raise UserError(f"{what} needs all devices of the mesh in one process")

    def queue(self, job: Job, priority: int) -> None:
        """Put a request behind those of its priority.

        Raises:
            UserError: it would have to move from process to process, or might.
        """
        if priority or job.outside is not None:
            self._check_movable("a priority or a session")
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

    def entering(self, limit: int) -> list[Job]:
        """Those in prefill, and those in the queue that can have a row now: as many as devices.

        One that comes back needs no prefill: it decodes at once.

        Args:
            limit: requests that may be in rows.
        """
        jobs = [job for job in self if job.prefill is not None]
        while len(jobs) < len(self._machines):
            room = self._room(self.waiting[0], limit) if self.waiting else None
            if room is None:
                break
            for victim in room.rows:
                self.park(victim)
            for victim in room.pages:
                self._take_out_of_pages(victim)
            jobs.append(self._let_in(self.waiting.pop(0), room.device))
        return [job for job in jobs if job.row is not None]

    def _let_in(self, job: Job, device: int) -> Job:
        """A request gets a free row of a device."""
        if job.home is not None:  # what was set aside for it
            self._home(job).ledger.leave(job.number)
        first = device * self._each
        job.row, job.home = self.rows.index(None, first, first + self._each), device
        self.rows[job.row] = job
        machine, row = self.place(job)
        machine.ledger.enter(job.number)
        machine.quiet(row)
        self._enter(job, machine, row)
        return job

    def park(self, job: Job) -> bool:
        """Take a request out of its row into the queue. False where that cannot be done."""
        if job.row is None or job.reason is not None:
            return False
        machine, size = self.place(job)[0], self._parked_bytes(job)
        if not machine.ledger.can_park(size):
            return False
        self._leave(job, keep=True)
        machine.ledger.park(job.number, size)
        bisect.insort(self.waiting, job, key=_rank)
        return True

    def yield_turn(self, job: Job) -> bool:
        """Take a request out of its row, behind those of its priority. False as for `park`."""
        self._check_movable("preemption")
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
                self._home(job).sharing.release(job.outside.holding)
        else:
            self._leave(job, keep=False)
        if job.home is not None:
            self._home(job).ledger.leave(job.number)

    def _home(self, job: Job) -> Machine:
        assert job.home is not None  # it has had a row
        return self._machines[job.home]

    def _room(self, job: Job, limit: int) -> _Room | None:
        """Who gives what up so that a waiting request can enter now; None: it has to wait.

        As few as possible leave their rows, and the device is the one that has most room.
        """
        rooms = [self._room_on(device, job, limit) for device in self._open(job)]
        found = [room for room in rooms if room is not None]
        return min(found, key=lambda room: (len(room.rows), len(room.pages)), default=None)

    def _open(self, job: Job) -> list[int]:
        """Devices that a waiting request may enter, those with most room first."""
        if isinstance(job.outside, Paged):
            return [device for device in (job.home,) if device is not None]
        busy = {other.home for other in self if other.prefill is not None}
        free = [device for device in range(len(self._machines)) if device not in busy]
        ledgers = [machine.ledger for machine in self._machines]
        unused = lambda device: self._machines[device].sharing.pages.unused
        return sorted(free, key=lambda device: (len(ledgers[device].held), -unused(device)))

    def _room_on(self, device: int, job: Job, limit: int) -> _Room | None:
        """The same on one device: only those of lower priority leave, the last of them first."""
        ledger, running = self._machines[device].ledger, list(self)
        lower = [
            other
            for other in running
            if other.home == device and other.rank[0] > job.rank[0] and not other.reason
        ]
        lower.sort(key=_rank, reverse=True)
        for count in range(len(lower) + 1):
            victims = tuple(lower[:count])
            size = sum(self._parked_bytes(victim) for victim in victims)
            rows = len(running) - count < limit and ledger.can_park(size)
            if rows and ledger.fits([victim.number for victim in victims]):
                pages = self._pages_for(device, job, victims)
                if pages is not None:
                    return _Room(device, victims, pages)
        return None

    def _pages_for(self, device: int, job: Job, victims: tuple[Job, ...]) -> tuple[Job, ...] | None:
        """Who leaves host pages so that a request fits into them beside those that stay.

        None, where nobody can; else as few as possible of those without a row, the last first.
        """
        if isinstance(job.outside, Paged):
            return ()
        machine = self._machines[device]
        prompt = job.request.prompt if job.outside is None else ()
        sharing, positions = machine.sharing, job.request.end(machine.cfg.capacity)
        anew = [self._holding(victim) for victim in victims if victim.prefill is not None]
        begun = [victim for victim in victims if victim.prefill is None]
        paged = [other for other in self.waiting if isinstance(other.outside, Paged)]
        others = [other for other in paged if other.home == device]
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
        machine, row = self.place(job)
        return machine.sharing.of(row)

    def _parked_bytes(self, job: Job) -> int:
        """What a request in a row may take outside of host pages; one in prefill starts anew.

        It is set aside as soon as a request leaves its row, so that whoever is first in the queue
        can always have the pages of those that wait behind.
        """
        if job.prefill is not None:
            return 0
        return session_bytes(self._home(job), job.positions)

    def _take_out_of_pages(self, job: Job) -> None:
        """A request without a row gives its host pages up."""
        assert isinstance(job.outside, Paged)  # callers ask
        paged, machine = job.outside, self._home(job)
        job.outside = capture(machine, paged, job.request, job.draw, job.produced)
        machine.sharing.release(paged.holding)

    def _enter(self, job: Job, machine: Machine, row: int) -> None:
        """Put a request into a row, or begin to."""
        request = job.request
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

    def _leave(self, job: Job, *, keep: bool) -> None:
        """A request leaves its row, with its host pages if they are to be kept and it has begun."""
        machine, row = self.place(job)
        if job.prefill is not None:
            job.prefill.close()
            job.prefill = job.chunk = None
            machine.leave(row)
        else:
            text = (*job.request.prompt, *job.produced)
            machine.sharing.has(row, text[:-1])  # the last token is not in the history
            if keep:
                job.outside = page_out(machine, row)
            else:
                machine.leave(row)
        self.rows[self.rows.index(job)] = None
        job.row = None


def _rank(job: Job) -> tuple[int, int]:
    return job.rank
