"""The jitted functions of one engine. Each is traced once; lengths, budgets and load are arrays."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float, Int

from dhisparse_jax import prefill
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.output import packed_steps
from dhisparse_jax.engine.sharing import Entry
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.admit import admit_prompt, readmit
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import Beside, Params, ServedModel, layers_of, places_of
from dhisparse_jax.precision import full_precision
from dhisparse_jax.prefill import OpenPrompt, Prompt
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.sampling import Sampler, choose
from dhisparse_jax.speculation.protocol import Drafter, DraftState
from dhisparse_jax.speculation.schedule import Load, join_load
from dhisparse_jax.step import Speculation, Texts, finish_step
from dhisparse_jax.verify import forward


@pytree
class Hidden:
    """Residual stream of a prompt in prefill.

    Attributes:
        now: after the last finished group; position p is in row p - origin. P rows, the capacity in
            whole chunks.
        taps: what a drafter reads of each tapped layer, of the newest positions: position p is in
            row (p - origin) mod Q, where Q is a number of whole chunks.
        tokens: int32 token ids, in the rows of `now`.
        origin: first position that is computed; those before are shared, maybe some after it too.
    """

    now: Float[Array, "P D"]
    taps: Float[Array, "taps Q width"]
    tokens: Int[Array, " P"]
    origin: Int[Array, ""]


class Compiled:
    """Functions of (params, state, ...), with model and configuration bound and states donated.

    Args:
        model: the served model.
        cfg: sizes of the hierarchy.
        chunk: prompt tokens per prefill call.
        speculation: who proposes tokens.
        form: containers of the model's weights, whose leaves `step` takes.
        steps: decode steps per call of `step`.

    Attributes:
        tap_rows: newest positions of a prompt whose tapped hidden states are kept: what the drafter
            reads, in whole chunks.
    """

    def __init__(
        self,
        model: ServedModel,
        cfg: HierarchyConfig,
        chunk: int,
        speculation: Speculation,
        form: PyTreeDef,
        steps: int = 1,
    ) -> None:
        self.chunk, drafter = chunk, speculation.drafter
        room = prefill.padded_capacity(cfg, chunk)
        window = room if drafter.window is None else drafter.window
        # The oldest chunk is overwritten by the newest, which may hold a single token.
        self.tap_rows = min(room, (-(-window // chunk) + 1) * chunk)
        step = partial(packed_steps, steps, model, speculation, cfg, form)
        self.step = jax.jit(full_precision(step), donate_argnums=(3, 4), keep_unused=True)
        self.forward = jax.jit(full_precision(partial(forward, model, cfg)), donate_argnums=1)
        self.finish = jax.jit(lambda state, n: finish_step(state, cfg, n), donate_argnums=0)
        self.embed = jax.jit(partial(_embed, model, len(drafter.taps), self.tap_rows))
        self.logits = jax.jit(full_precision(partial(_logits, model, chunk)))
        self.prefill = jax.jit(
            full_precision(partial(_prefill_chunk, model, cfg, chunk, drafter.taps)),
            static_argnums=1,
            donate_argnums=(2, 3),
        )
        self.begin_prompt = jax.jit(partial(_begin_prompt, cfg, chunk), static_argnums=1)
        self.join = jax.jit(partial(_join, cfg), donate_argnums=0)
        self.leave = jax.jit(lambda state, row: requests.leave(state, cfg, row), donate_argnums=0)
        self.admit = jax.jit(partial(_admit, cfg), static_argnums=1, donate_argnums=0)
        self.readmit = jax.jit(
            lambda state, pool, row: readmit(state, cfg, pool, row),
            static_argnums=1,
            donate_argnums=0,
        )
        self.first_token = jax.jit(full_precision(partial(_first_token, model)))
        self.draft_step = jax.jit(full_precision(partial(_draft_step, model, drafter)))
        draft_prompt = full_precision(partial(_draft_prompt, drafter, chunk))
        self.draft_prompt = jax.jit(draft_prompt, donate_argnums=1)
        self.draft_reset = jax.jit(lambda *args: drafter.reset(*args), donate_argnums=0)
        self.capture = jax.jit(partial(_capture, cfg), static_argnums=1)
        self.draft_row = jax.jit(lambda *args: _take_row(*args))
        self.set_draft_row = jax.jit(lambda *args: _put_row(*args), donate_argnums=0)
        # Of its own: jit caches by function, so engines would share and count one.
        self.set_text = jax.jit(lambda *args: _set_text(*args), donate_argnums=(0, 1))

    def traces(self) -> int:
        """How many programs the jitted functions hold: constant after warm-up."""
        return sum(f._cache_size() for f in vars(self).values() if hasattr(f, "_cache_size"))


def _join(
    cfg: HierarchyConfig,
    state: HierarchyState,
    row: Int[Array, ""],
    length: Int[Array, ""],
    pages: Int[Array, " N"],
) -> HierarchyState:
    return requests.join(state, cfg, row, length, pages)


def _begin_prompt(
    cfg: HierarchyConfig,
    chunk: int,
    state: HierarchyState,
    pool: int,
    entry: Entry,
) -> Prompt:
    return prefill.begin_prompt(cfg, chunk, state, pool, entry.source, entry.shared)


def _embed(
    model: ServedModel,
    taps: int,
    tap_rows: int,
    params: Params,
    tokens: Int[Array, " P"],
    origin: Int[Array, ""],
) -> Hidden:
    """A prompt from position `origin` on, before the first group."""
    x = model.embed(params, tokens[None])[0]
    tapped = jnp.zeros((taps, tap_rows, model.geometry.feature_width or x.shape[1]), x.dtype)
    return Hidden(now=x, taps=tapped, tokens=tokens, origin=origin)


def _logits(
    model: ServedModel, chunk: int, params: Params, hidden: Float[Array, "P D"], at: Int[Array, ""]
) -> Float[Array, "chunk V"]:
    """Logits of the `chunk` positions from `at` on."""
    return model.logits(params, lax.dynamic_slice_in_dim(hidden, at, chunk)[None])[0]


def _first_token(
    model: ServedModel,
    params: Params,
    hidden: Hidden,
    length: Int[Array, ""],
    sampler: Sampler,
) -> Int[Array, ""]:
    """The token after a prompt of `length` tokens; `sampler` has one row."""
    logits = model.logits(params, hidden.now[length - 1 - hidden.origin][None, None])[0]
    return choose(logits, sampler, length[None])[0]


def _set_text(texts: Texts, load: Load, row: Int[Array, ""], text: Texts) -> tuple[Texts, Load]:
    """Row `row` writes the one row of `text` from now on."""
    put = lambda every, one: every.at[row].set(one[0])
    return jax.tree.map(put, texts, text), join_load(load, row)


def _draft_step(
    model: ServedModel,
    drafter: Drafter,
    params: Params,
    draft_params: Params,
    state: DraftState,
    texts: Texts,
    length: Int[Array, " R"],
) -> DraftState:
    """What the drafter does in a step, by itself; embeddings stand in for the target's features."""
    proposal = drafter.propose(draft_params, state, texts.anchor, length, texts.sampler)
    x = model.embed(params, jnp.concatenate((texts.anchor[:, None], proposal.tokens), axis=1))
    features = jnp.tile(x[..., : model.geometry.feature_width], len(drafter.taps))
    return drafter.commit(draft_params, state, features, length, jnp.full_like(length, x.shape[1]))


def _draft_prompt(  # noqa: PLR0913  # what jit binds, and what it is called with
    drafter: Drafter,
    chunk: int,
    params: Params,
    state: DraftState,
    row: Int[Array, ""],
    taps: Float[Array, "taps Q width"],
    origin: Int[Array, ""],
    start: Int[Array, ""],
    length: Int[Array, ""],
) -> DraftState:
    """Give the drafter the positions from `start` to `start + chunk` of a prompt of `length`.

    `taps` has them; position `origin` is in its row 0.
    """
    own = start - origin
    piece = lax.dynamic_slice_in_dim(taps, own % taps.shape[1], chunk, axis=1)
    features = jnp.moveaxis(piece, 0, 1).reshape(1, chunk, -1)
    mine = _take_row(state, row)
    count = jnp.minimum(length - start, chunk)
    mine = drafter.commit(params, mine, features, start[None], count[None])
    return _put_row(state, row, mine)


def _take_row(state: DraftState, row: Int[Array, ""]) -> DraftState:
    """One row of a draft state, by itself."""
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, row, 1), state)


def _put_row(state: DraftState, row: Int[Array, ""], mine: DraftState) -> DraftState:
    """The reverse of `_take_row`."""
    put = lambda every, one: lax.dynamic_update_slice_in_dim(every, one, row, axis=0)
    return jax.tree.map(put, state, mine)


def _capture(
    cfg: HierarchyConfig,
    state: HierarchyState,
    pool: int,
    pages: Int[Array, " N"],
    length: Int[Array, ""],
) -> Prompt:
    """Records and index keys of one pool that lie in host pages; zeros from `length` on."""
    room = jnp.zeros((cfg.records(pool), *cfg.record_shape(pool)), jnp.int32)
    return Prompt(
        records=requests.recall(state, cfg, pool, pages, length, room),
        keys=requests.recall_keys(state, cfg, pool, pages, length),
        known=length,
    )


def _admit(
    cfg: HierarchyConfig,
    state: HierarchyState,
    pool: int,
    row: Int[Array, ""],
    prompt: Prompt,
    kept: Int[Array, ""],
) -> HierarchyState:
    """Store a prefilled prompt; its first `kept` positions are in shared host pages."""
    own = lambda rows: rows[: cfg.records(pool)]
    records, keys = own(prompt.records), jax.tree.map(own, prompt.keys)
    return admit_prompt(state, cfg, pool, row, records, keys, kept, prompt.kept)


def _prefill_chunk(  # noqa: PLR0913  # what jit binds, and what it is called with
    model: ServedModel,
    cfg: HierarchyConfig,
    chunk: int,
    taps: tuple[int, ...],
    params: Params,
    pool: int,
    hidden: Hidden,
    prompt: Prompt,
    start: Int[Array, ""],
) -> tuple[Hidden, Prompt]:
    """One chunk of a prompt through one group; `hidden` is updated in place.

    `start` is the first row of the chunk in `hidden.now`.
    """

    def attend_it(
        opened: OpenPrompt,
        layer: int,
        row: Float[Array, "1 E width"] | None,
        query: Float[Array, "1 T H width"],
    ) -> tuple[Attended, OpenPrompt]:
        return prefill.attend_prompt(opened, cfg, pool, layer, row, query)

    x = lax.dynamic_slice_in_dim(hidden.now, start, chunk)[None]
    first = hidden.origin + start
    positions = first + jnp.arange(chunk, dtype=jnp.int32)[None]

    def open_it(index: IndexInputs, opened: OpenPrompt | None = None) -> OpenPrompt:
        if opened is None:
            return prefill.open_prompt(prompt, cfg, pool, first, index)
        return prefill.select_again(opened, cfg, pool, index)

    places = places_of(cfg.geometry, pool, taps)
    tokens = lax.dynamic_slice_in_dim(hidden.tokens, start, chunk)[None]
    beside = Beside(tokens=tokens, kept=prompt.kept, writes=jnp.ones(1, jnp.bool_))
    ran = model.run_group(params, pool, x, positions, open_it, attend_it, places, beside)
    now = lax.dynamic_update_slice_in_dim(hidden.now, ran.x[0], start, axis=0)
    kept = hidden.taps
    for layer, stream in zip(layers_of(cfg.geometry, pool, places), ran.taps, strict=True):
        at = (jnp.int32(taps.index(layer)), start % kept.shape[1], jnp.int32(0))
        kept = lax.dynamic_update_slice(kept, stream.astype(kept.dtype), at)
    prompt = dataclasses.replace(ran.opened.prompt, kept=ran.kept)
    return dataclasses.replace(hidden, now=now, taps=kept), prompt
