"""Prefill group by group: all chunks of a prompt pass one selection group before the next.

While a group is being prefilled, its records and index keys of this prompt stay on the device, so a
long prompt never reads host memory back; they reach the host pool once, when the group is done.
Positions that another request has already are not computed: the group begins with their records,
read from the host once, and prefill goes on behind them. Where a draft needs hidden states of the
newest of them, these are computed again, and their records and keys stay as they are, bit for bit.
Device memory beside the state: one group's records and keys of one prompt, and the hidden states of
the prompt, whatever the number of layers. They have room for the whole capacity, however short the
prompt is, so that each program is compiled once (`engine.memory.prompt_bytes`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout, requests
from dhisparse_jax.hierarchy.formats import AnyKeys, no_keys, stored_keys, stored_rows
from dhisparse_jax.hierarchy.heads import attend_slots
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import Blocks, IndexInputs, choose
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import KeptLeaves
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.record_layout import placed_words


@pytree
class Prompt:
    """Records and index keys of one prompt in one group, as they are stored; row = record.

    P rows: what the capacity rounded up to whole chunks holds, and one chunk more, since the first
    of them may start at any position. The records of the first `known` positions were there before;
    they stay as they are, also where they are computed again.

    Attributes:
        records: its records.
        keys: its index keys.
        known: int32 positions that were there before.
        kept: what the layers of the group keep of it.
    """

    records: Int[Array, "P *W"]
    keys: AnyKeys
    known: Int[Array, ""]
    kept: KeptLeaves = ()


@pytree
class OpenPrompt:
    """A chunk of a prompt inside a group: the prompt so far, the chunk's start and selection.

    Attributes:
        prompt: the prompt so far.
        start: int32 first position of the chunk.
        selection: int32 selected records.
        blocks: what the first selection left to the others; see `hierarchy.select.Selection`.
    """

    prompt: Prompt
    start: Int[Array, ""]
    selection: Int[Array, "1 T K"]
    blocks: Blocks


def padded_capacity(cfg: HierarchyConfig, chunk: int) -> int:
    """The capacity rounded up to whole chunks, so that no chunk crosses the end."""
    return -(-cfg.capacity // chunk) * chunk


def empty_prompt(cfg: HierarchyConfig, pool: int, chunk: int) -> Prompt:
    """Room for one prompt in one group."""
    geometry = cfg.geometry
    rows = geometry.fresh(pool, padded_capacity(cfg, chunk) + chunk)
    return Prompt(
        records=jnp.zeros((rows, *cfg.record_shape(pool)), jnp.int32),
        keys=no_keys(geometry, rows),
        known=jnp.int32(0),
        kept=tuple(
            jnp.zeros((1, kept.rows(cfg.capacity, chunk), kept.width), kept.dtype)
            for kept in geometry.kept_of(pool)
        ),
    )


def begin_prompt(
    cfg: HierarchyConfig,
    chunk: int,
    state: HierarchyState,
    pool: int,
    host_pages: Int[Array, " N"],
    shared: Int[Array, ""],
) -> Prompt:
    """A prompt whose first `shared` positions are in host memory.

    Args:
        cfg: sizes of the hierarchy.
        chunk: tokens per chunk.
        state: the hierarchy.
        pool: which group.
        host_pages: int32 host pages that hold them.
        shared: int32 how many positions.
    """
    empty = empty_prompt(cfg, pool, chunk)
    return dataclasses.replace(
        empty,
        records=requests.recall(state, cfg, pool, host_pages, shared, empty.records),
        keys=jax.tree.map(
            lambda room, known: room.at[: cfg.records(pool)].set(known),
            empty.keys,
            requests.recall_keys(state, cfg, pool, host_pages, shared),
        ),
        known=shared,
    )


def open_prompt(
    prompt: Prompt, cfg: HierarchyConfig, pool: int, start: Int[Array, ""], index: IndexInputs
) -> OpenPrompt:
    """Select for the tokens of the chunk that starts at position `start`.

    Args:
        prompt: the prompt in this group so far.
        cfg: sizes of the hierarchy.
        pool: which group.
        start: int32 first position of the chunk.
        index: what the indexer computed; R = 1, T = tokens in the chunk.
    """
    assert index.keys is not None  # a model selects from a group for the first time with them
    with jax.named_scope("append"):
        keys = jax.tree.map(
            lambda every, fresh: _written(cfg, pool, prompt, every, fresh, start),
            prompt.keys,
            stored_keys(cfg.geometry, index.keys[0]),
        )
    return _selected(dataclasses.replace(prompt, keys=keys), cfg, pool, start, index, None)


def select_again(
    opened: OpenPrompt, cfg: HierarchyConfig, pool: int, index: IndexInputs
) -> OpenPrompt:
    """Select again from the records of the group: the counterpart of `group.select_again`."""
    return _selected(opened.prompt, cfg, pool, opened.start, index, opened.blocks)


def _selected(
    prompt: Prompt,
    cfg: HierarchyConfig,
    pool: int,
    start: Int[Array, ""],
    index: IndexInputs,
    blocks: Blocks,
) -> OpenPrompt:
    with jax.named_scope("select"):
        end = start + 1 + jnp.arange(index.queries.shape[1], dtype=jnp.int32)[None]
        visible = layout.complete(cfg, pool, end)
        one = jax.tree.map(lambda every: every[None], prompt.keys)
        found = choose(cfg.geometry, pool, index, one, visible, blocks)
    return OpenPrompt(prompt=prompt, start=start, selection=found.records, blocks=found.blocks)


def attend_prompt(
    opened: OpenPrompt,
    cfg: HierarchyConfig,
    pool: int,
    layer: int,
    row: Float[Array, "1 E width"] | None,
    query: Float[Array, "1 T H key"],
) -> tuple[Attended, OpenPrompt]:
    """Write the chunk's rows of one layer and attend; a record is its own slot here.

    The prefill counterpart of `hierarchy.group.attend`, through the same operation.
    """
    prompt, records = opened.prompt, opened.prompt.records
    first_word = layer * layout.row_stride(cfg.geometry, records)
    if row is not None:
        with jax.named_scope("append"):
            words = stored_rows(cfg.geometry.row, row[0])
            words, place = placed_words(words, first_word, cfg.record_layout)
            records = _written(cfg, pool, prompt, records, words, opened.start, place)
    with jax.named_scope("attend"):
        attended = attend_slots(cfg.geometry, pool, layer, query, records, opened.selection)
    prompt = dataclasses.replace(prompt, records=records)
    return attended, dataclasses.replace(opened, prompt=prompt)


def _written(
    cfg: HierarchyConfig,
    pool: int,
    prompt: Prompt,
    old: Shaped[Array, "P *_"],
    rows: Shaped[Array, "E *_"],
    start: Int[Array, ""],
    place: tuple[int | Int[Array, ""], ...] = (),
) -> Shaped[Array, "P *_"]:
    """`old` with `rows` from position `start` on, but for what the prompt knows already.

    `place` is where they begin in the other dimensions; at 0 by default.
    """
    first, known = (layout.complete(cfg, pool, position) for position in (start, prompt.known))
    place = place or (0,) * (old.ndim - 1)
    at = (first, *(jnp.int32(begin) for begin in place))
    before = lax.optimization_barrier(lax.dynamic_slice(old, at, rows.shape))
    own = first + jnp.arange(rows.shape[0], dtype=jnp.int32) >= known
    own = own.reshape(-1, *[1] * (old.ndim - 1))
    return lax.dynamic_update_slice(old, jnp.where(own, rows, before), at)
