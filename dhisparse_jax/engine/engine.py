"""Continuous batching over a fixed number of request rows."""

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.compiled import Compiled
from dhisparse_jax.engine.events import (
    Event,
    Finished,
    FinishReason,
    NewTokens,
    PrefillProgress,
    StepDone,
    step_metrics,
)
from dhisparse_jax.engine.memory import check_memory
from dhisparse_jax.engine.request import Request
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.state import HierarchyState, init
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.sampling import greedy, row_values

PREFILL_CHUNK = 256


@dataclasses.dataclass
class _Running:
    """A request in a row, and what it has produced."""

    number: int
    request: Request
    produced: int = 0


class Engine:
    """Runs requests over one hierarchy; requests join and leave between steps.

    Args:
        model: the served model.
        params: its weights.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.

    Attributes:
        state: the hierarchy, between steps.
        sizes: bytes of its parts.
        compiled: the jitted functions.

    Raises:
        UserError: if the state does not fit into memory, or exceeds the model's context.
    """

    def __init__(
        self,
        model: ServedModel,
        params: Params,
        cfg: HierarchyConfig,
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        if cfg.capacity > model.context:
            raise UserError(
                f"a capacity of {cfg.capacity} positions exceeds the model's context of "
                f"{model.context}"
            )
        self.sizes = check_memory(cfg)
        # All arguments of the jitted functions are committed to the device from the start, as their
        # results are: an uncommitted one would compile the step a second time.
        commit = partial(jax.device_put, device=jax.devices()[0])
        self.model, self.params, self.cfg = model, commit(params), cfg
        self.compiled = Compiled(model, cfg, min(chunk, cfg.capacity))
        self.state: HierarchyState = init(cfg)
        self._rows: list[_Running | None] = [None] * cfg.requests
        self._tokens = commit(jnp.zeros(cfg.requests, jnp.int32))
        self._sampler = commit(greedy(cfg.requests))

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Run the requests in order, as many at a time as there are rows.

        Stopping the iteration early abandons what is running; the engine stays usable.

        Raises:
            UserError: if a prompt leaves no position to write to.
        """
        for request in requests:
            self._check(request)
        waiting = deque(_Running(number, request) for number, request in enumerate(requests))
        steps = 0
        try:
            while waiting or any(self._rows):
                while waiting and None in self._rows:
                    yield from self._start(self._rows.index(None), waiting.popleft())
                if any(self._rows):
                    steps += 1
                    yield from self._step(steps)
        finally:
            for row, running in enumerate(self._rows):
                if running is not None:
                    self._free(row)

    def prefill(
        self, row: int, number: int, tokens: Sequence[int]
    ) -> Generator[Event, None, Float[Array, "P D"]]:
        """Prefill a prompt into a free row, group by group; returns its final hidden states.

        The row is active afterwards, with `len(tokens)` committed positions.
        """
        chunk = self.compiled.chunk
        starts = range(0, len(tokens), chunk)
        padded = np.zeros(-(-self.cfg.capacity // chunk) * chunk, np.int32)
        padded[: len(tokens)] = tokens
        where = jnp.int32(row)
        self.state = self.compiled.join(self.state, where, jnp.int32(len(tokens)))
        hidden = self.compiled.embed(self.params, jnp.asarray(padded))
        total, done = len(starts) * self.cfg.pools, 0
        for pool in range(self.cfg.pools):
            prompt = self.compiled.empty_prompt(pool)
            for start in starts:
                hidden, prompt = self.compiled.prefill(
                    self.params, pool, hidden, prompt, jnp.int32(start)
                )
                done += 1
                yield PrefillProgress(number, done, total)
            self.state = self.compiled.admit(self.state, pool, where, prompt)
            jax.block_until_ready(hidden)  # so that progress is what is done, not what is queued
        return hidden

    def leave(self, row: int) -> None:
        """Free a row that `prefill` occupied."""
        self.state = self.compiled.leave(self.state, jnp.int32(row))

    def _check(self, request: Request) -> None:
        room = self.cfg.capacity
        if len(request.prompt) >= room:
            raise UserError(
                f"{request.name}: the prompt has {len(request.prompt)} tokens, the context is "
                f"{room}; shorten the prompt to at most {room - 1}"
            )
        for token in (min(request.prompt), max(request.prompt)):
            if not 0 <= token < self.model.vocabulary:
                raise UserError(
                    f"{request.name}: token {token} is outside the vocabulary of "
                    f"{self.model.vocabulary}"
                )

    def _start(self, row: int, running: _Running) -> Iterator[Event]:
        """Prefill a request and choose its first token."""
        self._rows[row] = running
        tokens = running.request.prompt
        hidden = yield from self.prefill(row, running.number, tokens)
        values = row_values(running.request.sampling, running.number)
        self._sampler = self.compiled.set_sampler(self._sampler, jnp.int32(row), values)
        first = self.compiled.first_token(
            self.params, hidden, jnp.int32(len(tokens)), self._sampler, jnp.int32(row)
        )
        self._tokens = self._tokens.at[row].set(first)
        yield from self._deliver(row, int(first))

    def _step(self, number: int) -> Iterator[Event]:
        """One decode step for every running request."""
        with jax.profiler.StepTraceAnnotation("decode_step", step_num=number):
            output, self.state = self.compiled.step(
                self.params, self.state, self._tokens, self._sampler
            )
            self._tokens = output.tokens
            tokens, counts = jax.device_get((output.tokens, output.counts))
        yield StepDone(number, step_metrics(self.cfg, counts))
        for row, running in enumerate(self._rows):
            if running is not None:
                yield from self._deliver(row, int(tokens[row]))

    def _deliver(self, row: int, token: int) -> Iterator[Event]:
        """Report a new token; free the row if it was the last one."""
        running = self._rows[row]
        assert running is not None  # callers pass occupied rows
        running.produced += 1
        yield NewTokens(running.number, (token,))
        reason = self._finished(running, token)
        if reason is not None:
            self._free(row)
            yield Finished(running.number, reason)

    def _finished(self, running: _Running, token: int) -> FinishReason | None:
        if token in running.request.stop:
            return "stop"
        if running.produced >= running.request.max_new_tokens:
            return "length"
        if len(running.request.prompt) + running.produced >= self.cfg.capacity:
            return "context"
        return None

    def _free(self, row: int) -> None:
        self._rows[row] = None
        self.leave(row)
