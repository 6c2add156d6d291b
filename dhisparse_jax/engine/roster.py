"""Who is in which row, who waits, and who makes room for whom."""

import bisect
from collections.abc import Iterator, Sequence

from dhisparse_jax.engine.job import Job
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.machine import Machine


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
        return bool(self.waiting) and self._victims(self.waiting[0], limit) is not None

    def entering(self, limit: int) -> Job | None:
        """The request in prefill, or the first in the queue if it can have a row now.

        One that comes back needs no prefill: it decodes at once.

        Args:
            limit: requests that may be in rows.
        """
        for job in self:
            if job.prefill is not None:
                return job
        victims = self._victims(self.waiting[0], limit) if self.waiting else None
        if victims is None:
            return None
        for victim in victims:
            self.park(victim)
        job = self.waiting.pop(0)
        sharing, prompt = self._machine.sharing, job.request.prompt
        job.row = sharing.best_row([row for row, held in enumerate(self.rows) if held is None])
        self.rows[job.row] = job
        self._ledger.enter(job.number)
        self._machine.quiet(job.row)
        if job.session is None:
            entry = sharing.enter(job.row, prompt, self._positions(job))
            job.prefill = self._machine.prefill(job.row, job.number, prompt, entry)
        else:
            self._machine.restore(job.row, job.session)
            job.session = None
        return job

    def park(self, job: Job) -> bool:
        """Take a request out of its row into the queue. False where that cannot be done."""
        size = self._parked_bytes(job)
        if job.row is None or job.reason is not None or not self._ledger.can_park(size):
            return False
        if job.prefill is None:
            job.session = self._machine.capture(job.row, job.request, job.draw, job.produced)
        self._vacate(job)
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
        else:
            self._vacate(job)
        self._ledger.leave(job.number)

    def _victims(self, job: Job, limit: int) -> tuple[Job, ...] | None:
        """Who leaves so that a waiting request can enter now; None: it has to wait.

        As few as possible, only of lower priority, and the last of them first.
        """
        running = list(self)
        lower = [other for other in running if other.rank[0] > job.rank[0] and not other.reason]
        lower.sort(key=_rank, reverse=True)
        for count in range(len(lower) + 1):
            victims = tuple(lower[:count])
            if len(running) - count < limit and self._fits(job, victims):
                size = sum(self._parked_bytes(victim) for victim in victims)
                return victims if self._ledger.can_park(size) else None
        return None

    def _fits(self, job: Job, victims: Sequence[Job]) -> bool:
        rows = [victim.row for victim in victims if victim.row is not None]
        prompt = job.request.prompt if job.session is None else ()
        host = self._machine.sharing.fits(prompt, self._positions(job), rows)
        return host and self._ledger.fits([victim.number for victim in victims])

    def _positions(self, job: Job) -> int:
        return job.request.end(self._machine.cfg.capacity)

    def _parked_bytes(self, job: Job) -> int:
        """What a request in a row takes outside of it; one in prefill starts anew."""
        return 0 if job.prefill is not None else self._machine.session_bytes(job.positions)

    def _vacate(self, job: Job) -> None:
        assert job.row is not None  # callers ask
        if job.prefill is None:  # the last token is not in the history
            text = (*job.request.prompt, *job.produced)
            self._machine.sharing.has(job.row, text[:-1])
        if job.prefill is not None:
            job.prefill.close()
            job.prefill = None
        self._machine.leave(job.row)
        self.rows[job.row] = None
        job.row = None


def _rank(job: Job) -> tuple[int, int]:
    return job.rank
