"""Adapt: residency follows the load. A policy is nothing but the budgets it sets.

`resident` and `fixed` give every active request the same pages for its whole life. `adaptive`
divides the same memory anew: an active request always keeps its floor, which covers the working
set; what is above goes where a page saves most fetches, as `ghost.page_value` has measured it.

The rule. In each hot pool, up to `moves_per_step` times per step, the first of these that applies:
1. Fewer pages are free than the low watermark says: whoever loses least gives one back, so that a
   newcomer finds free ones.
2. More are free than the high watermark says: whoever saves most gets one, also if it misses
   nothing yet, so that a history which fits is never evicted in the first place.
3. Somebody who misses records would save HYSTERESIS times what another one, above its floor, would
   lose by a page: it changes hands.
Nobody gets pages that it cannot fill by the end of the next step: an empty slot saves nothing, and
whoever had it before would miss it. With no row left for a newcomer there is no reserve, and both
watermarks are 0.

The bound. A step gives a token or more, so a generated token moves at most `moves_per_step` pages
of each hot pool. An admission moves others, once in the life of a request: what it takes from those
who lose least is at most an even share (`admission_budgets`).

Why it does not thrash. What 1 gives back, 2 does not grant: the watermarks are apart. What one
saves by a page is what it would lose with it again, so after 3 the other one wants its page back
only if the measured ratio of both has changed by HYSTERESIS squared, in averages over 20 steps; and
every page more is worth less than the one before, so under a constant load all come to rest. No
record moves: a released page is a table edit, a granted one is empty.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.ghost import DECAY, learn, page_value, saved_by_next
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import HierarchyState

HYSTERESIS = 1.5
"""How many times as much a page must save elsewhere before it is taken from who uses it."""

HIGH_WATERMARK, LOW_WATERMARK = 128, 256
"""One page in so many is free above each."""

MISSES = 1.5
"""Who has fetched so many records of late misses some; the prior of a value assumes one."""

_NEVER = -1.0
_HALVINGS = 32


class Holders(NamedTuple):
    """Everybody who may hold pages of one hot pool: its pools, request after request.

    Attributes:
        value: fetches per step that a page more would save, with the pages held now.
        useful: pages that it can fill by the end of the next step.
        floor: pages that it never falls below; 0 for nobody.
        active: whether there is a request.
        misses: whether it fetches more than MISSES.
    """

    value: Float[Array, " n"]
    useful: Int[Array, " n"]
    floor: Int[Array, " n"]
    active: Bool[Array, " n"]
    misses: Bool[Array, " n"]


def adapt(state: HierarchyState, cfg: HierarchyConfig) -> HierarchyState:
    """Set the budgets of the next step from the load of this one; identity unless `adaptive`.

    A step says nothing of who selected nothing in it: a request in prefill keeps what is expected
    of it, and so its pages, however many steps others take meanwhile. One that is done keeps its
    own for the dispatches that are under way, until `leave` gives them all back.
    """
    took_part = state.counts.selected > 0
    fetched = state.counts.fetched.astype(jnp.float32)
    miss_rate = DECAY * state.miss_rate + (1.0 - DECAY) * fetched
    miss_rate = jnp.where(took_part, miss_rate, state.miss_rate)
    state = dataclasses.replace(state, miss_rate=jnp.where(state.active[None], miss_rate, 0.0))
    if cfg.policy is not Policy.ADAPTIVE:
        return state
    state = dataclasses.replace(state, benefit=learn(state.benefit, cfg, took_part))
    target: dict[int, Int[Array, " R"]] = {}
    for number, pools in enumerate(cfg.hot_pools):
        low, high = watermarks(state, cfg, number)
        held = _move_pages(
            _of(state.budget, pools),
            _holders(state, cfg, number),
            cfg,
            layout.pages(cfg, number),
            low,
            high,
        )
        target |= zip(pools, held.reshape(len(pools), -1), strict=True)
    budgets = jnp.stack([target[pool] for pool in range(cfg.pools)])
    return set_budgets(state, cfg, budgets, cfg.moves_per_step)


def admission_budgets(
    state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""]
) -> Int[Array, "pools R"]:
    """Budgets that let `request` in: never less than the floor for anybody.

    An adaptive newcomer gets its even share, or what is free if that is more, as far as its history
    can use it; what is not free comes from those who value it least.
    """
    if cfg.policy is not Policy.ADAPTIVE:
        return state.budget.at[:, request].set(_floors(cfg, range(cfg.pools)))
    target = state.budget
    for number, pools in enumerate(cfg.hot_pools):
        members, total = jnp.array(pools), layout.pages(cfg, number)
        holders, held = _holders(state, cfg, number), _of(target, pools)
        low, _ = watermarks(state, cfg, number)
        even = total // (jnp.maximum(state.active.sum(dtype=jnp.int32), 1) * len(pools))
        spare = (total - low - held.sum()) // len(pools)
        useful = jnp.stack([_history(state, cfg, pool)[request] for pool in pools])
        wish = jnp.minimum(jnp.maximum(even, spare), useful)
        wish = jnp.maximum(wish, _floors(cfg, pools))
        kept = _shrink(held, holders, total - wish.sum()).reshape(len(pools), -1)
        target = target.at[members].set(kept).at[members, request].set(wish)
    return target


def watermarks(
    state: HierarchyState, cfg: HierarchyConfig, number: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Free pages of a hot pool below which some are released, and above which some are granted."""
    total, open_rows = layout.pages(cfg, number), ~jnp.all(state.active)
    mark = lambda share: jnp.where(open_rows, total // share, 0).astype(jnp.int32)
    return mark(LOW_WATERMARK), mark(HIGH_WATERMARK)


def _floors(cfg: HierarchyConfig, pools: Iterable[int]) -> Int[Array, " pools"]:
    """Pages of each pool that an active request never falls below."""
    return jnp.array([cfg.floor_pages(pool) for pool in pools], jnp.int32)


def _history(state: HierarchyState, cfg: HierarchyConfig, pool: int) -> Int[Array, " R"]:
    """Pages of a pool that the history of each request can fill."""
    coming = layout.complete(cfg, pool, state.length) + cfg.fresh(pool)
    used = jnp.minimum(coming, cfg.records(pool))
    return jnp.maximum(-(-used // cfg.page_slots), cfg.floor_pages(pool))


def _fillable(
    state: HierarchyState, cfg: HierarchyConfig, members: tuple[int, ...]
) -> Int[Array, "pools R"]:
    """Pages for the records that pools hold of everybody, and for those of the next step."""
    held = jnp.stack([state.hot_records[pool] for pool in members])
    fresh = jnp.array([cfg.fresh(pool) for pool in members], jnp.int32)[:, None]
    expected = jnp.stack([state.miss_rate[pool] for pool in members])
    coming = jnp.maximum(jnp.ceil(expected).astype(jnp.int32), fresh)
    return -(-(held + coming) // cfg.page_slots)


def _of(every: Shaped[Array, "pools R"], members: tuple[int, ...]) -> Shaped[Array, " n"]:
    """What belongs to the pools `members`, request after request."""
    return jnp.concatenate([every[pool] for pool in members])


def _holders(state: HierarchyState, cfg: HierarchyConfig, number: int) -> Holders:
    members = cfg.hot_pools[number]
    everywhere = lambda leaf: jnp.tile(leaf, len(members))
    history = jnp.concatenate([_history(state, cfg, pool) for pool in members])
    floors = jnp.where(state.active[None], _floors(cfg, members)[:, None], 0)
    fillable = _fillable(state, cfg, members).reshape(-1)
    return Holders(
        value=_of(page_value(state), members),
        useful=jnp.minimum(history, fillable),
        floor=floors.reshape(-1),
        active=everywhere(state.active),
        misses=_of(state.miss_rate, members) > MISSES * (1.0 - DECAY),
    )


def _shrink(held: Int[Array, " n"], holders: Holders, limit: Int[Array, ""]) -> Int[Array, " n"]:
    """Release pages until `limit` are held at most, so that what is left is worth the same to all.

    The value of a page goes about with the inverse square of the pages held (`ghost`): at the
    common value v a holder keeps held * sqrt(value / v). With 8 and 8 pages worth 4 and 1, a limit
    of 12 leaves 8 and 4.
    """
    weight = held.astype(jnp.float32) * jnp.sqrt(holders.value)
    floor = jnp.minimum(held, holders.floor)
    kept = lambda scale: jnp.clip((weight * scale).astype(jnp.int32), floor, held)

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        fits = kept(middle).sum() <= limit
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    # At the largest of these scales everybody keeps everything.
    least = jnp.min(jnp.where(held > 0, holders.value, jnp.inf))
    most = 1.001 / jnp.sqrt(jnp.maximum(least, jnp.finfo(jnp.float32).tiny))
    scale, _ = lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(most), most))
    return jnp.where(held.sum() <= limit, held, kept(scale))


def _move_pages(
    held: Int[Array, " n"],
    holders: Holders,
    cfg: HierarchyConfig,
    total: int,
    low: Int[Array, ""],
    high: Int[Array, ""],
) -> Int[Array, " n"]:
    """Up to `moves_per_step` times, one page to or from somebody; see the module.

    Unrolled, and with selects in place of updates: a loop is launched turn by turn on a GPU.
    """
    value = lambda pages: holders.value * saved_by_next(held, pages)
    who = jnp.arange(held.shape[0], dtype=jnp.int32)

    def move(_: Int[Array, ""], now: Int[Array, " n"]) -> Int[Array, " n"]:
        free = total - now.sum()
        grow = free > high
        asks = holders.active & (now < holders.useful) & (grow | holders.misses)
        wants = jnp.where(asks, value(now), _NEVER)
        gives = jnp.where(now > holders.floor, value(now - 1), jnp.inf)
        taker, giver = jnp.argmax(wants), jnp.argmin(gives)
        shed = (free < low) & (gives[giver] < jnp.inf)
        grow = grow & (wants[taker] >= 0.0)
        trade = ~shed & (free <= high) & (gives[giver] * HYSTERESIS < wants[taker])
        taken = now + ((who == taker) & (grow | trade)).astype(jnp.int32)
        return taken - ((who == giver) & (shed | trade)).astype(jnp.int32)

    return lax.fori_loop(0, cfg.moves_per_step, move, held, unroll=True)
