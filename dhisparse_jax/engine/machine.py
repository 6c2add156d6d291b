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
from dhisparse_jax.engine.compiled import Compiled, Hidden
from dhisparse_jax.engine.events import Event, PrefillProgress
from dhisparse_jax.engine.memory import check_memory
from dhisparse_jax.engine.meter import Meter, seconds_of
from dhisparse_jax.engine.output import Packed, places
from dhisparse_jax.engine.request import Request
from dhisparse_jax.engine.session import Session, fingerprint
from dhisparse_jax.engine.sharing import Entry, Sharing
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.state import HierarchyState, init
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.prefill import Prompt, empty_prompt, padded_capacity
from dhisparse_jax.sampling import sampler_row
from dhisparse_jax.speculation.protocol import NO_DRAFT, Draft, check_draft
from dhisparse_jax.speculation.schedule import Rule, init_load
from dhisparse_jax.step import MAX_STOPS, DecodeState, Speculation, Texts, no_texts
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.rows import WORD_BYTES

PREFILL_CHUNK = 256


class Machine:
    """One hierarchy and the jitted functions over it.

    Args:
        model: the served model.
        params: its weights.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.
        draft: proposes tokens; by default none, so that a step gives one token.
        rule: how many of the proposed tokens are verified.
        steps: decode steps in one dispatch. A request that ends inside one idles until its end.

    Attributes:
        steps: as given.
        state: the hierarchy, between steps.
        draft_state: what the drafter keeps of every request.
        load: what the last steps were like, for the rule.
        texts: what every row is writing.
        meter: what the machine does, for the rule.
        sizes: bytes of its parts.
        stepwise: wait for every piece of prefill, so that what it takes can be known.
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
        self.steps, self.stepwise = steps, False
        # All arguments of the jitted functions are committed to the device from the start, as their
        # results are: an uncommitted one would compile the step a second time.
        commit = self._commit = partial(jax.device_put, device=jax.devices()[0])
        self.model, self.params, self.cfg = model, commit(params), cfg
        self.drafter, self.draft_params = draft.drafter, commit(draft.params)
        speculation = Speculation(draft.drafter, rule)
        self.compiled = Compiled(model, cfg, min(chunk, cfg.capacity), speculation, steps)
        self.state: HierarchyState = init(cfg)
        self.sharing = Sharing(cfg)
        self.draft_state = commit(draft.drafter.init(cfg.requests))
        self.load = commit(init_load(cfg.requests, draft.drafter.length))
        self.texts = commit(no_texts(cfg.requests))
        self._places = deque(commit(places(cfg, steps)))
        self.meter = Meter(cfg, self.state) if rule is not Rule.ALL else Meter(cfg)

    def prefill(
        self, row: int, number: int, tokens: Sequence[int], entry: Entry | None = None
    ) -> Generator[Event, None, Hidden]:
        """Prefill a prompt into a free row, group by group; returns its final hidden states.

        The drafter gets the prompt too. By default nothing is shared, and the row can be used up to
        its capacity. Decode steps may run between two pieces, as long as the row's text says that
        it writes nothing (`quiet`).

        The row is active afterwards, with `len(tokens)` committed positions.
        """
        entry = entry or self.sharing.enter(row, (), self.cfg.capacity)
        chunk, own = self.compiled.chunk, tokens[int(entry.shared) :]
        starts = range(0, len(own), chunk)
        padded = np.zeros(padded_capacity(self.cfg, chunk), np.int32)
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
                if self.stepwise:
                    jax.block_until_ready(hidden)
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
        """Free a row: its pages come back. Its text can be shared until they are needed."""
        self.state = self.compiled.leave(self.state, jnp.int32(row))
        self.sharing.leave(row)

    def quiet(self, row: int) -> None:
        """The row writes nothing until `write` says what."""
        self._set_text(row, no_texts(1))

    def write(self, row: int, request: Request, draw: int, anchor: Int[Array, " one"]) -> None:
        """The row writes the text of `request` from now on, after the token `anchor`."""
        self._set_text(row, self._text(request, draw, anchor))

    def _set_text(self, row: int, text: Texts) -> None:
        text = self._commit(text)
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
        state = DecodeState(
            hierarchy=self.state, draft=self.draft_state, load=self.load, texts=self.texts
        )
        place = self._places.popleft()
        state, output = self.compiled.step(
            self.params, self.draft_params, self.meter.profile, state, place
        )
        self._places.append(output)
        self.state, self.draft_state = state.hierarchy, state.draft
        self.load, self.texts = state.load, state.texts
        for leaf in jax.tree.leaves(output):
            if leaf.size:
                leaf.copy_to_host_async()
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

    def resident_share(self) -> float:
        """Part of the committed history that hot pages and tails have room for; 1 of nothing."""
        budget, length = jax.device_get((self.state.budget, self.state.length))
        room = np.minimum(budget * self.cfg.page_slots + self.cfg.tail, length[None])
        return float(room.sum() / max(self.cfg.pools * length.sum(), 1)) if length.any() else 1.0

    @functools.cached_property
    def model_id(self) -> str:
        """Names the model and its weights: a session of another one cannot be continued."""
        return fingerprint((self.model.geometry, self.model.vocabulary), self.params)

    @functools.cached_property
    def draft_id(self) -> str:
        """Names the draft: the ring of another one means nothing to it."""
        return fingerprint(self.drafter, self.draft_params)

    def session_bytes(self, positions: int) -> int:
        """Bytes of the arrays that `capture` copies of so many committed positions."""
        words = sum(self.cfg.record_words(pool) for pool in range(self.cfg.pools))
        keys = self.cfg.pools * self.cfg.geometry.key_bytes
        return positions * (words * WORD_BYTES + keys) + self.sizes.draft_bytes // self.cfg.requests

    def capture(self, row: int, request: Request, draw: int, produced: Sequence[int]) -> Session:
        """Copy everything that a row's request needs to go on; the row stays as it is.

        Raises:
            UserError: its history is more than can be copied.
        """
        self.cfg.geometry.check_movable("a session")
        length, where = len(request.prompt) + len(produced) - 1, jnp.int32(row)
        pools = [
            jax.device_get(self.compiled.capture(self.state, pool, where, jnp.int32(length)))
            for pool in range(self.cfg.pools)
        ]
        ring = jax.device_get(self.compiled.draft_row(self.draft_state, where))
        return Session(
            model=self.model_id,
            draft=self.draft_id,
            request=request,
            draw=draw,
            produced=tuple(produced),
            records=tuple(pool.records[:length].copy() for pool in pools),
            keys=tuple(
                jax.tree.map(lambda keys: keys[:length].copy(), pool.keys) for pool in pools
            ),
            ring=tuple(jax.tree.leaves(ring)),
        )

    def restore(self, row: int, session: Session) -> None:
        """Put a session into a free row, which goes on as if it had never stopped.

        Records enter where those of a prompt do. The ring of another draft, or of none, is replaced
        by one without features: proposals are poor at first, tokens the same.
        """
        where, length = jnp.int32(row), len(session.text) - 1
        # Records of its own: they may differ from those of a text in the last bit.
        entry = self.sharing.enter(row, (), session.request.end(self.cfg.capacity))
        self.state = self.compiled.join(self.state, where, jnp.int32(length), entry)
        for pool in range(self.cfg.pools):
            prompt = self._prompt(pool, session)
            self.state = self.compiled.admit(self.state, pool, where, prompt, entry.kept)
        self.sharing.has(row, session.text[:-1])
        if session.draft == self.draft_id:
            ring = jax.tree.unflatten(jax.tree.structure(self.draft_state), session.ring)
            self.draft_state = self.compiled.set_draft_row(self.draft_state, where, ring)
        else:
            stream = jax.eval_shape(self.model.embed, self.params, np.zeros((1, 1), np.int32))
            shape = (len(self.drafter.taps), self.compiled.tap_rows, stream.shape[-1])
            taps = self._commit(np.zeros(shape, stream.dtype))
            self._draft_prompt(where, taps, 0, length)
        anchor = jnp.asarray([session.text[-1]], jnp.int32)
        self.write(row, session.request, session.draw, anchor)

    def _prompt(self, pool: int, session: Session) -> Prompt:
        """The records and index keys of one pool, in the room that a prompt has."""
        length = len(session.text) - 1

        def padded(like: jax.ShapeDtypeStruct, rows: np.ndarray) -> jax.Array:
            whole = np.zeros(like.shape, like.dtype)
            whole[:length] = rows
            return self._commit(whole)

        like = jax.eval_shape(lambda: empty_prompt(self.cfg, pool, self.compiled.chunk))
        return Prompt(
            records=padded(like.records, session.records[pool]),
            keys=jax.tree.map(padded, like.keys, session.keys[pool]),
        )
