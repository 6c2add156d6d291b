"""Continuous batching over a fixed number of request rows."""

import dataclasses
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.compiled import Compiled, Hidden
from dhisparse_jax.engine.events import (
    Event,
    Finished,
    FinishReason,
    NewTokens,
    PrefillProgress,
    StepDone,
    step_acceptance,
    step_metrics,
)
from dhisparse_jax.engine.memory import check_memory
from dhisparse_jax.engine.meter import Meter, seconds_of
from dhisparse_jax.engine.request import Request, check_request
from dhisparse_jax.engine.sharing import Entry, Sharing
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.state import HierarchyState, init
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.sampling import sampler_row
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft, check_draft
from dhisparse_jax.speculation.schedule import Rule, init_load
from dhisparse_jax.step import MAX_STOPS, DecodeState, Speculation, StepOutput, Texts, no_texts
from pallas_kernels.common.ids import NO_SLOT

PREFILL_CHUNK = 256


@dataclasses.dataclass
class _Running:
    """A request in a row, and what it has produced."""

    number: int
    request: Request
    produced: list[int] = dataclasses.field(default_factory=list)


class Engine:
    """Runs requests over one hierarchy; requests join and leave between steps.

    Args:
        model: the served model.
        params: its weights.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.
        draft: proposes tokens; by default none, so that a step gives one token.
        rule: how many of the proposed tokens are verified.
        steps: decode steps in one dispatch. A request that ends inside one idles until its end.

    Attributes:
        state: the hierarchy, between steps.
        draft_state: what the drafter keeps of every request.
        load: what the last steps were like, for the rule.
        texts: what every row is writing.
        meter: what the machine does, for the rule.
        sizes: bytes of its parts.
        compiled: the jitted functions.
        sharing: who has which host pages.

    Raises:
        UserError: if the state does not fit into memory, or exceeds the model's context, or the
            drafter does not fit the model or the hierarchy.
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
    ) -> None:
        if cfg.capacity > model.context:
            raise UserError(
                f"a capacity of {cfg.capacity} positions exceeds the model's context of "
                f"{model.context}"
            )
        check_draft(draft.drafter, cfg)
        self.sizes = check_memory(cfg, draft.drafter)
        # All arguments of the jitted functions are committed to the device from the start, as their
        # results are: an uncommitted one would compile the step a second time.
        commit = partial(jax.device_put, device=jax.devices()[0])
        self.model, self.params, self.cfg = model, commit(params), cfg
        self.drafter, self.draft_params = draft.drafter, commit(draft.params)
        speculation = Speculation(draft.drafter, rule)
        self.compiled = Compiled(model, cfg, min(chunk, cfg.capacity), speculation, steps)
        self.state: HierarchyState = init(cfg)
        self.sharing = Sharing(cfg)
        self.draft_state = commit(draft.drafter.init(cfg.requests))
        self.load = commit(init_load(cfg.requests, draft.drafter.length))
        self.texts = commit(no_texts(cfg.requests))
        self.meter = Meter(cfg, self.state) if rule is not Rule.ALL else Meter(cfg)
        self._rows: list[_Running | None] = [None] * cfg.requests

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Run the requests in order, as many at a time as there are rows and host pages for.

        Stopping the iteration early abandons what is running; the engine stays usable.

        Raises:
            UserError: if a prompt leaves no position to write to, or the hierarchy has not one
                verify query more than the draft proposes tokens.
        """
        if self.cfg.queries != self.drafter.length + 1:
            raise UserError(
                f"the hierarchy has {self.cfg.queries} verify queries per step, but a draft of "
                f"{self.drafter.length} tokens needs {self.drafter.length + 1}"
            )
        for request in requests:
            check_request(request, self.model, self.cfg)
            self.sharing.check(request.name, request.end(self.cfg.capacity))
        waiting = deque(_Running(number, request) for number, request in enumerate(requests))
        steps = 0
        try:
            while waiting or any(self._rows):
                while waiting and None in self._rows and self._fits(waiting[0].request):
                    yield from self._start(waiting.popleft())
                if any(self._rows):
                    steps += yield from self._step(steps)
        finally:
            for row, running in enumerate(self._rows):
                if running is not None:
                    self._free(row)

    def prefill(
        self, row: int, number: int, tokens: Sequence[int], entry: Entry | None = None
    ) -> Generator[Event, None, Hidden]:
        """Prefill a prompt into a free row, group by group; returns its final hidden states.

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
            begin = time.perf_counter()
            output = self._dispatch()
            emitted: Any = jax.device_get(output)
            self.meter.add(time.perf_counter() - begin, emitted.records)
        steps = int(emitted.count.any(axis=1).sum())  # after the end of the last request, none
        for step in range(steps):
            now = jax.tree.map(lambda leaf, step=step: leaf[step], emitted)
            yield self._done(number + step + 1, now)
            for row, running in enumerate(self._rows):
                if running is not None:
                    yield from self._deliver(row, tuple(now.tokens[row, : now.count[row]].tolist()))
        return steps

    def _dispatch(self) -> StepOutput:
        state = DecodeState(
            hierarchy=self.state, draft=self.draft_state, load=self.load, texts=self.texts
        )
        output, state = self.compiled.step(
            self.params, self.draft_params, self.meter.profile, state
        )
        self.state, self.draft_state = state.hierarchy, state.draft
        self.load, self.texts = state.load, state.texts
        return output

    def _done(self, number: int, output: Any) -> StepDone:  # noqa: ANN401
        """What a step did; `output` is its `StepOutput` with NumPy arrays."""
        return StepDone(
            step=number,
            metrics=step_metrics(self.cfg, output.records),
            acceptance=step_acceptance(output.count, output.verified, self.drafter.length),
        )

    def _deliver(self, row: int, tokens: tuple[int, ...]) -> Iterator[Event]:
        """Report new tokens; free the row if the last one ended the request."""
        running = self._rows[row]
        assert running is not None  # callers pass occupied rows
        running.produced += tokens
        yield NewTokens(running.number, tokens)
        reason = self._finished(running, tokens[-1])
        if reason is not None:
            self._free(row)
            yield Finished(running.number, reason)

    def _finished(self, running: _Running, token: int) -> FinishReason | None:
        if token in running.request.stop:
            return "stop"
        if len(running.produced) >= running.request.max_new_tokens:
            return "length"
        if len(running.request.prompt) + len(running.produced) >= self.cfg.capacity:
            return "context"
        return None

    def _free(self, row: int) -> None:
        running, self._rows[row] = self._rows[row], None
        if running is not None and running.produced:  # the last token is not in the history
            self.sharing.has(row, (*running.request.prompt, *running.produced[:-1]))
        self.leave(row)
