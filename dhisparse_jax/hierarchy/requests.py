"""Requests come and go between steps: join, leave, and read what host pages hold.

A request may begin with positions that another one has already: `recall` and `recall_keys` read
what it needs of them, `join` gives it host pages that others have too, and `admit.admit_prompt`
leaves those as they are. A page is in several requests only if all its positions are shared, so
nobody ever writes to it; of a page that is shared in part, the newcomer gets a copy: the shared
records are read for the prefill, which needs them on the device, and `admit_prompt` writes them,
with the request's own, to a page of its own.

A request that leaves may keep its host pages. They hold all that it needs to come back: `join` with
the same pages, then `admit.readmit`, which reads them.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.adapt import admission_budgets
from dhisparse_jax.hierarchy.formats import AnyKeys
from dhisparse_jax.hierarchy.ghost import expected_misses, forget
from dhisparse_jax.hierarchy.keys import unpacked_keys
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import HierarchyState
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.retrieve.api import retrieve as retrieve_op
from pallas_kernels.retrieve.types import Fetches


def join(
    state: HierarchyState,
    cfg: HierarchyConfig,
    request: Int[Array, ""],
    length: Int[Array, ""],
    host_pages: Int[Array, " N"] | None = None,
) -> HierarchyState:
    """Occupy row `request` with a prompt of `length` positions and give it pages.

    The row must be free. Before the next step, `admit_prompt` or `readmit` must run for every pool.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        request: row of the request.
        length: int32 positions of the prompt.
        host_pages: int32 host pages for all positions that it will ever commit, NO_SLOT after them.
            None: as many as fit its capacity, which are the row's own.

    Raises:
        UserError: the rows have no host pages of their own, since there are too few.
    """
    if host_pages is None:
        host_pages = _own_pages(cfg, request)
    expected = expected_misses(state)
    state = dataclasses.replace(
        state,
        host_page_of=state.host_page_of.at[request].set(host_pages),
        length=state.length.at[request].set(length),
        active=state.active.at[request].set(True),
        benefit=forget(state.benefit, request),
    )
    state = set_budgets(state, cfg, admission_budgets(state, cfg, request))
    # Else the next newcomer would take its pages from this one, which has not missed anything yet.
    rate = expected / jnp.maximum(state.budget[:, request], 1).astype(jnp.float32)
    return dataclasses.replace(state, miss_rate=state.miss_rate.at[:, request].set(rate))


def _own_pages(cfg: HierarchyConfig, request: Int[Array, ""]) -> Int[Array, " N"]:
    if cfg.host_page_count < cfg.requests * cfg.row_pages:
        raise UserError(
            f"{cfg.host_page_count} host pages are not enough for {cfg.requests} rows of "
            f"{cfg.row_pages} each; say which ones a request gets"
        )
    return request * cfg.row_pages + jnp.arange(cfg.row_pages, dtype=jnp.int32)


def recall(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    host_pages: Int[Array, " N"],
    count: Int[Array, ""],
    room: Int[Array, "P *W"],
) -> Int[Array, "P *W"]:
    """Read the first `count` positions that lie in host pages; run it under `jit`.

    Args:
        state: the hierarchy.
        cfg: its sizes.
        pool: which pool.
        host_pages: int32 host pages in the order of positions, of a request or not.
        count: int32 positions whose records to read; the time goes with it.
        room: receives record p in row p; the other rows are unchanged.
    """
    return retrieve_op(state.pools[pool].host, room, _first(cfg, pool, host_pages, count))


def recall_keys(
    state: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    host_pages: Int[Array, " N"],
    count: Int[Array, ""],
) -> AnyKeys:
    """Read the index keys of the first `count` positions that lie in host pages; then come zeros.

    Arguments as in `recall`.
    """
    keys = state.pools[pool].host_keys
    if keys is None:
        return ()
    room = jnp.zeros((cfg.records(pool), *cfg.key_shape), jnp.int32)
    fetches = _first(cfg, pool, host_pages, count)
    return unpacked_keys(cfg, retrieve_op(keys, room, fetches))


def _first(
    cfg: HierarchyConfig, pool: int, host_pages: Int[Array, " N"], count: Int[Array, ""]
) -> Fetches:
    """The records of the first `count` positions, each into the row of its number."""
    position = jnp.arange(cfg.records(pool), dtype=jnp.int32)[None]
    rows = layout.host_rows(cfg, pool, host_pages[None], position)
    return Fetches(rows, position, layout.complete(cfg, pool, count)[None])


def leave(state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""]) -> HierarchyState:
    """Free row `request`: its pages come back, its records are forgotten."""
    state = dataclasses.replace(
        state,
        host_page_of=state.host_page_of.at[request].set(NO_SLOT),
        length=state.length.at[request].set(0),
        active=state.active.at[request].set(False),
        miss_rate=state.miss_rate.at[:, request].set(0.0),
        benefit=forget(state.benefit, request),
    )
    return set_budgets(state, cfg, state.budget.at[:, request].set(0))
