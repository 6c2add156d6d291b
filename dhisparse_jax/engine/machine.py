"""The device half of an engine: what can be done to the state and to one of its rows.

Knows rows and arrays; who is in which row, and when, is the engine's business.
"""

import functools
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.cell import Cell
from dhisparse_jax.engine.compiled import Compiled, Hidden
from dhisparse_jax.engine.events import PrefillProgress
from dhisparse_jax.engine.ledger import Ledger
from dhisparse_jax.engine.memory import check_memory, prompt_bytes
from dhisparse_jax.engine.meter import Meter, seconds_of
from dhisparse_jax.engine.output import Packed, places, send_to_host
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.seat import ALONE, Chunk, Pieces, Seat
from dhisparse_jax.engine.session import fingerprint
from dhisparse_jax.engine.sharing import Entry, Holding, Sharing
from dhisparse_jax.engine.watch import Nobody, Watcher
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import init
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.prefill import Prompt, padded_capacity
from dhisparse_jax.sampling import sampler_row
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft, check_draft
from dhisparse_jax.speculation.schedule import Rule, init_load
from dhisparse_jax.step import MAX_STOPS, DecodeState, Speculation, Texts, no_texts
from pallas_kernels.common.ids import NO_SLOT

PREFILL_CHUNK = 256
"""Prompt tokens per prefill call, where nothing else is asked for."""


class Machine(Cell):
    """One hierarchy and the jitted functions over it.

    Args:
        model: the served model.
        params: its weights.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.
        draft: proposes tokens; by default none, so that a step gives one token.
        rule: how many of the proposed tokens are verified.
        steps: decode steps in one dispatch. A request that ends inside one idles until its end.
        seat: where it is.

    Attributes:
        meter: what the machine does, for the rule.
        sizes: bytes of its parts.
        stepwise: wait for every piece of prefill, so that what it takes can be known.
        compiled: the jitted functions.
        named_by: weights that `model_id` is made of: those on all devices.
        sharing: who has which host pages.
        ledger: what the requests hold.
        together: whether chunks of prompts are run for it.
        watcher: is told of what changes the hierarchy.
        commit: puts arrays where the jitted functions want them.

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
        seat: Seat = ALONE,
    ) -> None:
        if cfg.capacity > model.context:
            raise UserError(
                f"a capacity of {cfg.capacity} positions exceeds the model's context of "
                f"{model.context}"
            )
        check_draft(draft.drafter, cfg)
        speculation, chunk = Speculation(draft.drafter, rule), min(chunk, cfg.capacity)
        form = jax.tree.structure(params)
        compiled = seat.programs or Compiled(model, cfg, chunk, speculation, form, steps)
        prompt, self.compiled = prompt_bytes(cfg, compiled, params), compiled
        self.sizes = check_memory(cfg, draft.drafter, seat.beside, prompt)
        self.steps, self.stepwise, self.together = steps, False, False
        # All arguments of the jitted functions are committed to the device from the start, as their
        # results are: an uncommitted one would compile the step a second time.
        device = seat.device or jax.local_devices()[0]
        commit = self.commit = partial(jax.device_put, device=device)
        self.model, self.cfg = model, cfg
        self.params = self.named_by = commit(params)
        self.drafter, self.draft_params = draft.drafter, commit(draft.params)
        self._weights = jax.tree.leaves(self.params)
        super().__init__(
            DecodeState(
                hierarchy=init(cfg, device),
                draft=commit(draft.drafter.init(cfg.requests)),
                load=commit(init_load(cfg.requests, draft.drafter.length)),
                texts=commit(no_texts(cfg.requests)),
            )
        )
        self.watcher: Watcher = Nobody()
        self.sharing, self.ledger = Sharing(cfg), Ledger.of(cfg)
        self._places = deque(commit(places(cfg, steps)))
        self.meter = Meter(cfg, self.state) if rule is not Rule.ALL else Meter(cfg)

    def prefill(
        self, row: int, number: int, tokens: Sequence[int], entry: Entry | None = None
    ) -> Pieces:
        """Prefill a prompt into a free row, group by group; returns its final hidden states.

        The drafter gets the prompt too. Of what is shared, it needs the hidden states of the newest
        positions, as many as it reads: these are computed again. By default nothing is shared, and
        the row can be used up to its capacity. Decode steps may run between two pieces, as long as
        the row's text says that it writes nothing (`quiet`). The row is active afterwards, with
        `len(tokens)` committed positions.
        """
        entry = entry or self.sharing.enter(row, (), self.cfg.capacity)
        origin = self._origin(int(entry.shared))
        chunk, own = self.compiled.chunk, tokens[origin:]
        starts = range(0, len(own), chunk)
        self.join(row, len(tokens), entry.pages)
        hidden = self.embed(own, origin)
        total, done = len(starts) * self.cfg.pools, 0
        for pool in range(self.cfg.pools):
            prompt = self.begin_prompt(pool, entry)
            for start in starts:
                hidden, prompt = yield from self._run(Chunk(pool, hidden, prompt, start))
                done += 1
                if self.stepwise:
                    jax.block_until_ready(hidden)
                yield PrefillProgress(number, done, total)
            self.admit(row, pool, prompt, entry)
            del prompt  # else it is there beside the next one
            jax.block_until_ready(hidden)  # so that progress is what is done, not what is queued
        self.sharing.has(row, tokens)
        self.draft_prompt(row, hidden, origin, len(tokens))
        return hidden

    def embed(self, tokens: Sequence[int], origin: int) -> Hidden:
        """A prompt from position `origin` on, before the first pool."""
        padded = np.zeros(padded_capacity(self.cfg, self.compiled.chunk), np.int32)
        padded[: len(tokens)] = tokens
        return self.compiled.embed(self.params, jnp.asarray(padded), np.int32(origin))

    def begin_prompt(self, pool: int, entry: Entry) -> Prompt:
        """What is known of a prompt in a pool before its first chunk."""
        return self.compiled.begin_prompt(self.state, pool, entry)

    def run_alone(self, chunk: Chunk) -> tuple[Hidden, Prompt]:
        """What a chunk makes of a prompt."""
        return self.compiled.prefill(
            self.params, chunk.pool, chunk.hidden, chunk.prompt, jnp.int32(chunk.start)
        )

    def _run(self, chunk: Chunk) -> Generator[Chunk, None, tuple[Hidden, Prompt]]:
        """The same, by whoever runs it."""
        if not self.together:
            return self.run_alone(chunk)
        yield chunk
        return chunk.hidden, chunk.prompt

    def _origin(self, shared: int) -> int:
        """First position that is computed of a prompt whose first `shared` are there."""
        window = self.drafter.window
        return 0 if window is None else max(0, shared - window)

    def draft_prompt(self, row: int, hidden: Hidden, origin: int, length: int) -> None:
        """Give the drafter a prompt that begins with position `origin`."""
        self._draft_taps(row, hidden.taps, origin, length)

    def _draft_taps(
        self, row: int, taps: Float[Array, "taps Q width"], origin: int, length: int
    ) -> None:
        """Give the drafter what it reads of a prompt: the newest positions, chunk by chunk."""
        where = jnp.int32(row)
        self.draft_state = self.compiled.draft_reset(self.draft_state, where)
        chunk = self.compiled.chunk
        first = origin + -(-(length - origin) // chunk) * chunk - self.compiled.tap_rows
        for start in range(max(origin, first), length, chunk):
            numbers = (jnp.int32(origin), jnp.int32(start), jnp.int32(length))
            self.draft_state = self.compiled.draft_prompt(
                self.draft_params, self.draft_state, where, taps, *numbers
            )

    def draft_nothing(self, row: int, length: int) -> None:
        """The drafter knows nothing of a row's positions; its features of them are zeros."""
        stream = jax.eval_shape(self.model.embed, self.params, np.zeros((1, 1), np.int32))
        width = self.model.geometry.feature_width or stream.shape[-1]
        shape = (len(self.drafter.taps), self.compiled.tap_rows, width)
        self._draft_taps(row, self.commit(np.zeros(shape, stream.dtype)), 0, length)

    def join(self, row: int, length: int, pages: Int[Array, " N"] | Int[np.ndarray, " N"]) -> None:
        """A request of `length` positions takes a free row; `pages` are its host pages."""
        where = jnp.int32(row)
        self.state = self.compiled.join(self.state, where, jnp.int32(length), pages)
        self.watcher.joined(row, length)

    def admit(self, row: int, pool: int, prompt: Prompt, entry: Entry) -> None:
        """Store the prompt of one pool."""
        self.state = self.compiled.admit(self.state, pool, jnp.int32(row), prompt, entry.kept)
        self.watcher.admitted(row, pool)

    def readmit(self, row: int, pool: int) -> None:
        """Bring what a row needs of one pool from its host pages."""
        self.state = self.compiled.readmit(self.state, pool, jnp.int32(row))
        self.watcher.admitted(row, pool)

    def leave(self, row: int) -> None:
        """Free a row: its pages come back. Its text can be shared until they are needed."""
        self.sharing.release(self.vacate(row))

    def vacate(self, row: int) -> Holding:
        """Free a row but for its host pages, which the caller has to release some time."""
        self.state = self.compiled.leave(self.state, jnp.int32(row))
        self.watcher.left(row)
        return self.sharing.take_out(row)

    def quiet(self, row: int) -> None:
        """The row writes nothing until `write` says what."""
        self._set_text(row, no_texts(1))

    def write(self, row: int, request: Request, draw: int, anchor: Int[Array, " one"]) -> None:
        """The row writes the text of `request` from now on, after the token `anchor`."""
        self._set_text(row, self._text(request, draw, anchor))

    def _set_text(self, row: int, text: Texts) -> None:
        text = self.commit(text)
        self.texts, self.load = self.compiled.set_text(self.texts, self.load, jnp.int32(row), text)

    def first_token(self, hidden: Hidden, request: Request, draw: int) -> Int[Array, " one"]:
        """The token after a prefilled prompt."""
        length = jnp.int32(len(request.prompt))
        sampler = sampler_row(request.sampling, draw)
        return self.compiled.first_token(self.params, hidden, length, sampler)[None]

    def _text(self, request: Request, draw: int, anchor: Int[Array, " one"]) -> Texts:
        """What a request is to write, as the one row of a `Texts`."""
        stop = (*request.stop, *(NO_SLOT,) * (MAX_STOPS - len(request.stop)))
        return Texts(
            anchor=anchor,
            end=jnp.asarray([request.end(self.cfg.capacity)], jnp.int32),
            stop=jnp.asarray([stop], jnp.int32),
            sampler=sampler_row(request.sampling, draw),
        )

    def dispatch(self) -> Packed:
        """Launch some decode steps for every row that writes; the output is sent to the host.

        It can be read until the dispatch after the next one, which takes its place.
        """
        place = self._places.popleft()
        state, output = self.compiled.step(
            self._weights, self.draft_params, self.meter.profile, self.cell(), place
        )
        self._places.append(output)
        self.put(state)
        send_to_host(output)
        self.watcher.stepped(output)
        return output

    def draft_step_seconds(self) -> float:
        """Seconds of a proposal and its commit by themselves; 0 without a draft.

        In a step they are part of one program with everything else, whose parts the host cannot
        time. The state stays as it is.
        """
        if self.drafter.length == 0:
            return 0.0
        inputs = (self.params, self.draft_params, self.draft_state, self.texts, self.state.length)
        return seconds_of(lambda: self.compiled.draft_step(*inputs))

    def residency(self) -> tuple[int, int]:
        """Records that hot pages and tails have room for, and records of the history."""
        complete = [layout.complete(self.cfg, p, self.state.length) for p in range(self.cfg.pools)]
        budget, lengths = jax.device_get((self.state.budget, complete))
        records = np.stack(lengths)
        room = np.minimum(budget * self.cfg.page_slots + self.cfg.tail, records)
        return int(room.sum()), int(records.sum())

    @functools.cached_property
    def model_id(self) -> str:
        """Names the model and its weights: a session of another one cannot be continued."""
        return fingerprint((self.model.geometry, self.model.vocabulary), self.named_by)

    @functools.cached_property
    def draft_id(self) -> str:
        """Names the draft: the ring of another one means nothing to it."""
        return fingerprint(self.drafter, self.draft_params)
