"""What a request that has joined finds on the device: its newest records, and all its index keys.

`admit_prompt` puts a prefilled prompt there and into host memory. `readmit` brings a request back
from its host pages, which it never left: it reads the records that fit into its tail and hot slots,
and the index keys, and writes nothing to the host.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.formats import AnyKeys
from dhisparse_jax.hierarchy.kept import admit_kept
from dhisparse_jax.hierarchy.keys import packed_keys
from dhisparse_jax.hierarchy.requests import recall_keys
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_hot, with_hot_slots, with_pool
from pallas_kernels.backup.api import backup as backup_op
from pallas_kernels.common.ids import dropping, masked
from pallas_kernels.retrieve.api import retrieve as retrieve_op
from pallas_kernels.retrieve.types import Fetches


def admit_prompt(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    request: Int[Array, ""],
    records: Int[Array, "C *W"],
    keys: AnyKeys,
    start: Int[Array, ""] | int = 0,
    kept: tuple[Shaped[Array, "1 _ _"], ...] = (),
) -> HierarchyState:
    """Store a prefilled prompt in one pool: in host memory, index keys, tail, and hot slots.

    The newest positions before the tail get the hot slots that the request holds, so that under
    `resident` every position is on the device and none is ever fetched.

    Args:
        state: the hierarchy after `join`, which set the length.
        cfg: its sizes.
        pool: which pool.
        request: row of the request.
        records: records by position; rows at and beyond the length are ignored.
        keys: index keys by position, as they are stored.
        start: int32 positions below are in shared host pages, and not written.
        kept: what the layers have kept of it; see `kept`.
    """
    mine = state.pools[pool]
    position = jnp.arange(cfg.records(pool), dtype=jnp.int32)
    first, end = (
        layout.complete(cfg, pool, jnp.asarray(at)) for at in (start, state.length[request])
    )
    fresh = masked(position, (position >= first) & (position < end))
    (rows,) = layout.host_rows(cfg, pool, state.host_page_of[request][None], fresh[None])
    hosts, sources = {"host": mine.host}, [records]
    if mine.host_keys is not None:
        hosts["host_keys"] = mine.host_keys
        sources.append(packed_keys(keys, cfg.record_layout))
    written = backup_op([*hosts.values()], sources, rows, jnp.stack([position] * len(hosts)))
    state = with_pool(state, pool, **dict(zip(hosts, written, strict=True)))
    state = admit_kept(_with_keys(state, pool, request, keys), cfg, pool, request, kept)
    state, position, slot = _place(state, cfg, pool, request)
    number, _ = cfg.hot_pool_of(pool)
    slots = state.hot[number].slots
    at = dropping(slot, slots.shape[0])
    slots = slots.at[at].set(records[jnp.maximum(position, 0)], mode="drop")
    return with_hot_slots(state, number, slots)


def readmit(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, request: Int[Array, ""]
) -> HierarchyState:
    """Bring what one pool needs on the device from the host pages that the request has.

    Args:
        state: the hierarchy after `join`, with pages that hold all positions below the length.
        cfg: its sizes.
        pool: which pool.
        request: row of the request.
    """
    pages = state.host_page_of[request]
    keys = recall_keys(state, cfg, pool, pages, state.length[request])
    state = _with_keys(state, pool, request, keys)
    state, position, slot = _place(state, cfg, pool, request)
    number, _ = cfg.hot_pool_of(pool)
    rows = layout.host_rows(cfg, pool, pages[None], position[None])
    count = jnp.max(jnp.where(slot >= 0, jnp.arange(slot.shape[0], dtype=jnp.int32) + 1, 0))
    fetches = Fetches(rows, slot[None], count[None])
    slots = retrieve_op(state.pools[pool].host, state.hot[number].slots, fetches)
    return with_hot_slots(state, number, slots)


def _with_keys(
    state: HierarchyState, pool: int, request: Int[Array, ""], keys: AnyKeys
) -> HierarchyState:
    """The index keys of a whole row."""
    put = lambda every, mine: every.at[request].set(mine)
    index_keys = jax.tree.map(put, state.pools[pool].index_keys, keys)
    return with_pool(state, pool, index_keys=index_keys)


def _place(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, request: Int[Array, ""]
) -> tuple[HierarchyState, Int[Array, " n"], Int[Array, " n"]]:
    """Where the newest positions of a request go: the tail, and the hot slots that it holds.

    Returns:
        The hierarchy whose tables say so, positions, and the slot of each; NO_SLOT in between.
    """
    state, position, slot = _place_hot(state, cfg, pool, request)
    newest = layout.complete(cfg, pool, state.length[request]) - 1
    newest = newest - jnp.arange(cfg.tail, dtype=jnp.int32)
    newest = masked(newest, newest >= 0)
    tail = layout.tail_slot(cfg, pool, jnp.broadcast_to(request, newest.shape), newest)
    tail = masked(tail, newest >= 0)
    return state, jnp.concatenate([newest, position]), jnp.concatenate([tail, slot])


def _place_hot(
    state: HierarchyState, cfg: HierarchyConfig, pool: int, request: Int[Array, ""]
) -> tuple[HierarchyState, Int[Array, " n"], Int[Array, " n"]]:
    """The newest positions before the tail fill the request's hot slots, oldest first."""
    number, _ = cfg.hot_pool_of(pool)
    hot, mine = state.hot[number], state.pools[pool]
    place = jnp.arange(cfg.max_pages(pool) * cfg.page_slots, dtype=jnp.int32)
    page = mine.pages[request][place // cfg.page_slots]
    end = layout.tail_start(cfg, pool, state.length)[request]
    count = jnp.minimum(end, state.budget[pool, request] * cfg.page_slots)
    used = place < count
    position = masked(end - count + place, used)
    slot = masked(page * cfg.page_slots + place % cfg.page_slots, used)
    paged = dropping(slot, hot.position.shape[0])
    hot = dataclasses.replace(
        hot,
        position=hot.position.at[paged].set(position, mode="drop"),
        # Position p was written one step before position p + 1: the newest counts as just used.
        mark=hot.mark.at[paged].set(state.step - (end - position), mode="drop"),
    )
    slot_of = mine.slot_of.at[request, dropping(position, cfg.records(pool))].set(slot, mode="drop")
    held = state.hot_records.at[pool, request].set(used.sum(dtype=jnp.int32))
    state = dataclasses.replace(with_hot(state, number, hot), hot_records=held)
    return with_pool(state, pool, slot_of=slot_of), position, slot
