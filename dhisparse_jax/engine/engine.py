"""Continuous batching over a fixed number of request rows: who is in which row, and when."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
<<<<<<< HEAD
=======
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
>>>>>>> origin/prefix

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.events import (
    Event,
    Finished,
    NewTokens,
    StepDone,
    step_acceptance,
    step_metrics,
)
from dhisparse_jax.engine.job import Job, Part, check_request
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.machine import PREFILL_CHUNK, Machine
from dhisparse_jax.engine.pace import NO_LIMITS, Limits, Pace
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.roster import Roster
from dhisparse_jax.engine.session import Session, check_session
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft
from dhisparse_jax.speculation.schedule import Rule


class Engine(Machine):
    """Runs requests over one hierarchy; they come and go between steps.

    `submit` and `resume` queue a request, `advance` does one round of work, `cancel`, `preempt` and
    `save` act on a request at any time between two events. Requests enter in order of priority,
    then of arrival, and nobody overtakes the first in the queue: what fits alone runs some time.

    Args:
        model: the served model.
        params: its weights.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.
        draft: proposes tokens; by default none, so that a step gives one token.
        rule: how many of the proposed tokens are verified.
        steps: decode steps in one dispatch. A request that ends inside one idles until its end.
        limits: on the time per token, and on the memory for preempted requests.

    Attributes:
        ledger: what the requests hold.
        limits: as given.
        pace: how many may run.

    Raises:
        UserError: as `Machine`.
    """

    def __init__(
        self,
        model: ServedModel,
        params: Params,
        cfg: HierarchyConfig,
        chunk: int = PREFILL_CHUNK,
        draft: Draft = NO_DRAFT,
        rule: Rule = Rule.ALL,
        steps: int = 1,
        limits: Limits = NO_LIMITS,
    ) -> None:
        super().__init__(model, params, cfg, chunk, draft, rule, steps)
        self.ledger = Ledger.of(cfg, limits.parking)
        self.limits = limits
        self._reset()

    def _reset(self) -> None:
        self.pace = Pace(self.cfg.requests, self.limits.tpot)
        self._roster = Roster(self, self.ledger)
        self._pending: deque[Event | Part] = deque()
        self._next, self._steps = 0, 0
        self._last_end: float | None = None

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and no event is left to deliver."""
        return not self._roster.jobs and not self._pending

    @property
    def counts(self) -> tuple[int, int]:
        """Requests in rows, and requests that wait."""
        waiting = len(self._roster.waiting)
        return len(self._roster.jobs) - waiting, waiting

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Run the requests in order, as many at a time as there are rows; they are numbered from 0.

        Stopping the iteration early abandons what is running; the engine stays usable.

        Raises:
            UserError: as `submit`, before anything runs; or other requests are there already.
        """
        if not self.idle:
            raise UserError(
                f"{len(self._roster.jobs)} requests are in the engine; finish or cancel them"
            )
        self._reset()
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
            UserError: it can never run, or the hierarchy has not one verify query more than the
                draft proposes tokens.
        """
        self._check(request)
        return self._queue(request, draw, priority, None)

    def resume(
        self, session: Session, *, max_new_tokens: int | None = None, priority: int = 0
    ) -> int:
        """Queue a saved request; it goes on with the same tokens. Returns its number in events.

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
        """End a request, wherever it is; its last event says so. False: it has ended before."""
        job = self._roster.jobs.get(number)
        if job is None:
            return False
        self._pending.append(Finished(number, "cancelled"))
        self._roster.end(job)
        return True

    def save(self, number: int) -> Session:
        """Everything that a request needs to go on, which it does here too.

        Raises:
            UserError: there is no such request, or it has not produced a token yet.
        """
        job = self._roster.jobs.get(number)
        if job is None or job.reason is not None:
            raise UserError(f"there is no request {number} that could go on")
        if job.row is None and job.session is not None:
            return job.session
        if job.row is None or not job.decoding:
            raise UserError(f"request {number} has not begun; submit it again instead")
        return self.capture(job.row, job.request, job.draw, job.produced)

    def preempt(self, number: int) -> bool:
        """Take a request out of its row; it waits again, behind those of its priority.

        Returns False where it has no row, has ended, or does not fit into the parking memory.
        """
        job = self._roster.jobs.get(number)
        return job is not None and self._roster.yield_turn(job)

    def advance(self) -> Iterator[Event]:
        """One round: let in who fits, prefill, one dispatch. A stopped one goes on in the next."""
        yield from self._drain()
        yield from self._enter()
        if self._roster.decoding():
            self._step()
        else:
            self._last_end = None
        yield from self._drain()

    def _check(self, request: Request) -> None:
        if self.cfg.queries != self.drafter.length + 1:
            raise UserError(
                f"the hierarchy has {self.cfg.queries} verify queries per step, but a draft of "
                f"{self.drafter.length} tokens needs {self.drafter.length + 1}"
            )
        check_request(request, self.model, self.cfg)
        self.sharing.check(request.name, request.end(self.cfg.capacity))

    def _queue(self, request: Request, draw: int, priority: int, session: Session | None) -> int:
        job = Job(self._next, request, draw, session=session)
        job.produced.extend(session.produced if session else ())
        self._next += 1
        self._roster.queue(job, priority)
        return job.number

<<<<<<< HEAD
    def _enter(self) -> Iterator[Event]:
        """Let requests in and prefill, as much as may come between two steps."""
        done = 0
        while (job := self._roster.entering(self.pace.limit)) is not None:
            most = self.pace.pieces
            if most is not None and done >= most and self._roster.decoding():
                return
=======
        The drafter gets the prompt too. By default nothing is shared, and the row can be used up to
        its capacity.

        The row is active afterwards, with `len(tokens)` committed positions.
        """
        entry = entry or self.sharing.enter(row, (), self.cfg.capacity)
        chunk, own = self.compiled.chunk, tokens[int(entry.shared) :]
        starts = range(0, len(own), chunk)
        padded = np.zeros(-(-self.cfg.capacity // chunk) * chunk, np.int32)
        padded[: len(own)] = own
        where = jnp.int32(row)
        self.state = self.compiled.join(self.state, where, jnp.int32(len(tokens)), entry)
        hidden = self.compiled.embed(self.params, jnp.asarray(padded), entry.shared)
        total, done = len(starts) * self.cfg.pools, 0
        for pool in range(self.cfg.pools):
            prompt = self.compiled.begin_prompt(self.state, pool, where, entry)
            for start in starts:
                hidden, prompt = self.compiled.prefill(
                    self.params, pool, hidden, prompt, jnp.int32(start)
                )
                done += 1
                yield PrefillProgress(number, done, total)
            self.state = self.compiled.admit(self.state, pool, where, prompt, entry.kept)
            jax.block_until_ready(hidden)  # so that progress is what is done, not what is queued
        self.sharing.has(row, tokens)
        self._draft_prompt(where, hidden.taps, int(entry.shared), len(tokens))
        return hidden

    def _draft_prompt(
        self, row: Int[Array, ""], taps: Float[Array, "taps Q D"], origin: int, length: int
    ) -> None:
        """Give the drafter what it reads of a prompt: the newest positions, chunk by chunk."""
        self.draft_state = self.compiled.draft_reset(self.draft_state, row)
        chunk = self.compiled.chunk
        first = origin + -(-(length - origin) // chunk) * chunk - self.compiled.tap_rows
        shared, own = range(max(0, first), origin, chunk), range(max(origin, first), length, chunk)
        for start, end in [*((p, origin) for p in shared), *((p, length) for p in own)]:
            where = (jnp.int32(origin), jnp.int32(start), jnp.int32(end))
            self.draft_state = self.compiled.draft_prompt(
                self.draft_params, self.draft_state, row, taps, *where
            )

    def leave(self, row: int) -> None:
        """Free a row that `prefill` occupied, or began to."""
        self.state = self.compiled.leave(self.state, jnp.int32(row))
        self.sharing.leave(row)

    def draft_step_seconds(self) -> float:
        """Seconds of a proposal and its commit by themselves; 0 without a draft.

        In a step they are part of one program with everything else, whose parts the host cannot
        time. The state stays as it is.
        """
        if self.drafter.length == 0:
            return 0.0
        inputs = (self.params, self.draft_params, self.draft_state, self.texts, self.state.length)
        return seconds_of(lambda: self.compiled.draft_step(*inputs))

    def _fits(self, request: Request) -> bool:
        return self.sharing.fits(request.prompt, request.end(self.cfg.capacity))

    def _start(self, running: _Running) -> Iterator[Event]:
        """Prefill a request, as far as it has to be, and choose its first token."""
        row = self.sharing.best_row([row for row, held in enumerate(self._rows) if held is None])
        tokens = running.request.prompt
        entry = self.sharing.enter(row, tokens, running.request.end(self.cfg.capacity))
        self._rows[row] = running
        hidden = yield from self.prefill(row, running.number, tokens, entry)
        text = self._text(running)
        first = self.compiled.first_token(self.params, hidden, jnp.int32(len(tokens)), text.sampler)
        text = dataclasses.replace(text, anchor=first[None])
        self.texts, self.load = self.compiled.set_text(self.texts, self.load, jnp.int32(row), text)
        yield from self._deliver(row, (int(first),))

    def _text(self, running: _Running) -> Texts:
        """What a request is to write, as the one row of a `Texts`; its anchor is not known yet."""
        request = running.request
        stop = (*request.stop, *(NO_SLOT,) * (MAX_STOPS - len(request.stop)))
        return Texts(
            anchor=jnp.zeros(1, jnp.int32),
            end=jnp.asarray([request.end(self.cfg.capacity)], jnp.int32),
            stop=jnp.asarray([stop], jnp.int32),
            sampler=sampler_row(request.sampling, running.number),
        )

    def _step(self, number: int) -> Generator[Event, None, int]:
        """One dispatch: some decode steps for every running request; returns how many.

        Args:
            number: steps done before.
        """
        with jax.profiler.StepTraceAnnotation("decode_step", step_num=number + 1):
>>>>>>> origin/prefix
            begin = time.perf_counter()
            event = self._piece(job)
            self.pace.add_piece(time.perf_counter() - begin)
            if event is None:
                yield from self._drain()
            else:
                yield event
            done += 1

    def _piece(self, job: Job) -> Event | None:
        """One piece of prefill; None after the last, with the first token pending."""
        assert job.prefill is not None and job.row is not None  # what `_entering` returns
        try:
            return next(job.prefill)
        except StopIteration as end:
            first = self.first_token(end.value, job.request, job.draw)
        job.prefill = None
        self.write(job.row, job.request, job.draw, first)
        self._give(job, (int(first[0]),))
        return None

    def _step(self) -> None:
        """One dispatch: some decode steps for every request that decodes; events are pending."""
        with jax.profiler.StepTraceAnnotation("decode_step", step_num=self._steps + 1):
            begin = time.perf_counter()
            output: Any = jax.device_get(self.dispatch())
            end = time.perf_counter()
        self.meter.add(end - begin, output.records)
        gap = end - (begin if self._last_end is None else self._last_end)
        self._last_end = end
        jobs = self._roster.decoding()
        counts = {job.number: int(output.count[:, job.row].sum()) for job in jobs}
        self.pace.add_step(gap, end - begin, counts)
        steps = int(output.count.any(axis=1).sum())  # after the end of the last request, none
        for step in range(steps):
            now = jax.tree.map(lambda leaf, step=step: leaf[step], output)
            self._steps += 1
            self._pending.append(self._done(now))
            for job in jobs:
                if count := int(now.count[job.row]):
                    self._give(job, tuple(now.tokens[job.row, :count].tolist()))

    def _done(self, output: Any) -> StepDone:  # noqa: ANN401
        """What a step did; `output` is its `StepOutput` with NumPy arrays."""
        return StepDone(
            step=self._steps,
            metrics=step_metrics(self.cfg, output.records),
            acceptance=step_acceptance(output.count, output.verified, self.drafter.length),
        )

    def _give(self, job: Job, tokens: tuple[int, ...]) -> None:
        """Take in new tokens of a request, to be delivered in their turn."""
        job.extend(tokens, self.cfg.capacity)
        self._pending.append(Part(job, tokens, job.reason))

    def _drain(self) -> Iterator[Event]:
        """Deliver what is pending; a request leaves its row when its last tokens are out."""
        while self._pending:
            item = self._pending.popleft()
            if not isinstance(item, Part):
                yield item
                continue
            if self._roster.jobs.get(item.job.number) is not item.job:
                continue  # cancelled
            if item.tokens:
                if item.reason is not None:  # in its turn, also if nobody listens any more by then
                    self._pending.appendleft(Part(item.job, (), item.reason))
                yield NewTokens(item.job.number, item.tokens)
            elif item.reason is not None:
                self._roster.end(item.job)
                yield Finished(item.job.number, item.reason)
