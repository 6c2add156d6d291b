"""Continuous batching over a fixed number of request rows: who is in which row, and when."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.crew import Weights, machines_of
from dhisparse_jax.engine.delivery import deliver
from dhisparse_jax.engine.events import Event, Finished, StepDone
from dhisparse_jax.engine.fleet import Fleet
from dhisparse_jax.engine.flight import Flight, Landed
from dhisparse_jax.engine.job import Job, Part, check_request
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.machine import PREFILL_CHUNK, Machine
from dhisparse_jax.engine.pace import NO_LIMITS, Limits, Pace
from dhisparse_jax.engine.pieces import read_piece
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.roster import Roster
from dhisparse_jax.engine.seat import ALONE
from dhisparse_jax.engine.session import Session, check_session
from dhisparse_jax.engine.whole import Whole
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft
from dhisparse_jax.speculation.schedule import Rule


class Engine(Machine):
    """Runs requests over one hierarchy, or one of each device; they come and go between steps.

    The device is given the next steps before the host reads those before, so that it never waits
    while only steps are to be done. A request ends on the device by itself: in a dispatch that was
    launched before the host knew, its row takes no part. What moves a request lands first.

    `submit` and `resume` queue a request, `advance` does one round of work, `cancel`, `preempt` and
    `save` act on a request at any time between two events. Requests enter in order of priority,
    then of arrival, and nobody overtakes the first in the queue: what fits alone runs some time.
    All raise UserError once an exception, as of an interrupt, has broken off the engine's work.

    Args:
        model: the served model.
        params: its weights.
        cfg: sizes of the hierarchy of each device.
        chunk: prompt tokens per prefill call.
        draft: proposes tokens; by default none, so that a step gives one token.
        rule: how many of the proposed tokens are verified.
        steps: decode steps in one dispatch. A request that ends inside one idles until its end.
        limits: on the time per token, and on the memory for preempted requests.
        mesh: devices with the axes of `dhisparse_jax.mesh`, which get the weights; None: the first.

    Attributes:
        machines: one a device; the engine is the first of this process.
        pace: how many may run.
        stepwise: as of a machine.
        now: where seconds come from.
        whole: false once an exception came out of its work, which may have cost the state.

    Raises:
        UserError: as `Machine`.
    """

    def __init__(  # noqa: PLR0913  # what it is made of
        self,
        model: ServedModel,
        params: Params,
        cfg: HierarchyConfig,
        chunk: int = PREFILL_CHUNK,
        draft: Draft = NO_DRAFT,
        rule: Rule = Rule.ALL,
        steps: int = 1,
        limits: Limits = NO_LIMITS,
        mesh: Mesh | None = None,
    ) -> None:
        weights = None if mesh is None else Weights.on(mesh, params, draft)
        own, draft, seat = weights.first() if weights else (params, draft, ALONE)
        super().__init__(model, own, cfg, chunk, draft, rule, steps, seat)
        self.stepwise = limits.tpot is not None
        self.machines = machines_of(weights, self, rule) if weights else (self,)
        self._fleet = Fleet(weights, self.machines) if weights else None
        for machine in self.machines:
            machine.ledger = Ledger.of(cfg, limits.parking, len(self.machines))
        self.limits = limits
        self.now: Callable[[], float] = time.perf_counter
        self.whole = Whole()
        self._reset()

    def _reset(self) -> None:
        self._roster = Roster(self.machines)
        self.pace = Pace(len(self._roster.rows), self.limits.tpot)
        self._pending: deque[Event | Part] = deque()
        self._flight: Flight | None = None
        self._next, self._launched, self._steps = 0, 0, 0
        self._last_end: float | None = None

    @property
    def idle(self) -> bool:
        """No request is waiting or running, the device is done, no event is left to deliver."""
        return not self._roster.jobs and not self._pending and self._flight is None

    @property
    def counts(self) -> tuple[int, int]:
        """Requests in rows, and requests that wait."""
        return len(list(self._roster)), len(self._roster.waiting)

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Run the requests in order, as many at a time as there are rows; they are numbered from 0.

        Stopping the iteration early abandons what is running; the engine stays usable.

        Raises:
            UserError: as `submit`, before anything runs; or there are others, here or elsewhere.
        """
        self.whole.check()
        if not self.idle:
            count = len(self._roster.jobs)
            raise UserError(f"{count} requests are in the engine; finish or cancel them")
        self._reset()
        if self._fleet:
            self._fleet.check(requests)
        for request in requests:
            self._check(request)
        for number, request in enumerate(requests):
            self.submit(request, draw=number)
        try:
            while not self.idle:
                yield from self.advance()
        finally:
            for number in tuple(self._roster.jobs):
                self.cancel(number)
            self._reset()

    def submit(self, request: Request, *, draw: int = 0, priority: int = 0) -> int:
        """Queue a request; returns its number in events.

        Args:
            request: what to do.
            draw: number that its random draws depend on, beside its seed.
            priority: the higher goes first, and takes the place of the lower that runs.

        Raises:
            UserError: it can never run, or the draft does not fit the hierarchy.
        """
        self._check(request)
        return self._queue(request, draw, priority, None)

    def resume(
        self, session: Session, *, max_new_tokens: int | None = None, priority: int = 0
    ) -> int:
        """Queue a saved request, which goes on with the same tokens; its number in events.

        Args:
            session: what `save` gave, here or in another engine of the model, or imported KV.
            max_new_tokens: a new limit, those of before included.
            priority: as in `submit`.

        Raises:
            UserError: it is of another model, does not fit, or has nothing left to do.
        """
        check_session(session, self.model_id, self.cfg)
        session = session.allowing(max_new_tokens)
        self._check(session.request)
        return self._queue(session.request, session.draw, priority, session)

    def cancel(self, number: int) -> bool:
        """End a request, wherever it is; its last event says so. False: it has ended before.

        Where the engine's work was broken off, all have: cleanup finds nothing to do.
        """
        job = self._roster.jobs.get(number)
        if job is None or not self.whole:
            return False
        with self.whole:
            self._pending.append(Finished(number, "cancelled"))
            self._roster.end(job)
        return True

    def save(self, number: int) -> Session:
        """Everything that a request needs to go on, which it does here too.

        Tokens that are in it may still have to be delivered by `advance`.

        Raises:
            UserError: there is no such request, or it has not produced a token yet.
        """
        with self.whole:
            self._land()
            return self._roster.session(number)

    def preempt(self, number: int) -> bool:
        """Take a request out of its row; it waits again, behind those of its priority.

        Its host pages stay its own until the first in the queue needs them. Returns False where it
        has no row, has ended, or does not fit into the parking memory.
        """
        with self.whole:
            self._land()
            job = self._roster.jobs.get(number)
            return job is not None and self._roster.yield_turn(job)

    def advance(self) -> Iterator[Event]:
        """One round: let in who fits, prefill, launch a dispatch, read the last. Can be resumed."""
        return self.whole.between(self._round())

    def _round(self) -> Iterator[Event]:
        """See `advance`."""
        yield from deliver(self._pending, self._roster)
        yield from self._enter()
        ahead = self._launch()
        self._land()
        self._flight = ahead
        if ahead is None:
            self._last_end = None
        yield from deliver(self._pending, self._roster)

    def _check(self, request: Request) -> None:
        check_request(request, self.model, self.cfg, self.drafter.length)
        self.sharing.check(request.name, request.end(self.cfg.capacity))

    def _queue(self, request: Request, draw: int, priority: int, session: Session | None) -> int:
        job = Job(self._next, request, draw, outside=session)
        job.produced.extend(session.produced if session else ())
        with self.whole:
            self._next += 1
            self._roster.queue(job, priority)
        return job.number

    def _enter(self) -> Iterator[Event]:
        """Let requests in and prefill, as much as may come between two steps."""
        done = 0
        while self._roster.wanted(self.pace.limit):
            most = self.pace.pieces
            if most is not None and done >= most and self._roster.decoding():
                return
            if self._flight is not None:
                self._land()
                yield from deliver(self._pending, self._roster)
                continue  # who is there, and what was asked, may be another now
            begin = self.now()
            jobs = self._roster.entering(self.pace.limit)
            if jobs:
                prefills = any(job.prefill is not None for job in jobs)
                self._read(jobs)
                self.pace.add_pause(self.now() - begin, prefills)
                yield from deliver(self._pending, self._roster)
            done += 1

    def _read(self, jobs: Sequence[Job]) -> None:
        """A piece of prefill of each, or what is left of putting it back; events are pending."""
        for job in jobs:
            begun = read_piece(job, *self._roster.place(job), self._pending)
            if begun is not None:
                first = self._fleet.told(begun.first) if self._fleet else begun.first
                self._give(job, (int(first[0]),))
        if self._fleet:
            self._fleet.read([job for job in jobs if job.chunk])

    def _launch(self) -> Flight | None:
        """Give the device some steps; None where nobody can have anything left to write then."""
        ahead = 0 if self._flight is None else self.steps  # tokens on their way, at least
        decoding = self._roster.decoding().items()
        jobs = {row: job for row, job in decoding if job.left(self.cfg.capacity) > ahead}
        if not jobs:
            return None
        self._launched += 1
        begin = self.now()
        with jax.profiler.StepTraceAnnotation("decode_step", step_num=self._launched):
            output = self._fleet.dispatch() if self._fleet else self.dispatch()
            return Flight(output, jobs, begin, len(self.machines))

    def _land(self) -> None:
        """Read the steps that are on their way, if any; their events are pending."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        landed = flight.land()
        self._take_time(flight, landed)
        for metrics, acceptance in landed.steps(self.cfg, self.drafter.length):
            self._steps += 1
            self._pending.append(StepDone(self._steps, metrics, acceptance))
        for row, tokens in landed.tokens.items():
            self._give(flight.jobs[row], tokens)

    def _take_time(self, flight: Flight, landed: Landed) -> None:
        """Note how long a dispatch took that has just landed."""
        end, before = self.now(), self._last_end
        self._last_end = end
        begin = flight.begin if before is None else before
        self.meter.add(end - max(begin, flight.begin), landed.output.records)
        counts = {flight.jobs[row].number: len(new) for row, new in landed.tokens.items()}
        if counts:
            self.pace.add_dispatch(end - begin, counts, landed.verified)

    def _give(self, job: Job, tokens: tuple[int, ...]) -> None:
        """Take in new tokens of a request, to be delivered in their turn."""
        job.extend(tokens, self.cfg.capacity)
        self._pending.append(Part(job, tokens, job.reason))
