"""Adaptive residency, move by move: 9 pages of 4 slots for 3 requests in one pool, floor 1."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import requests
from dhisparse_jax.hierarchy.adapt import adapt
from dhisparse_jax.hierarchy.ghost import DECAY, PRIOR
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import init
from dhisparse_jax.hierarchy.update import with_hot, with_pool
from pallas_kernels.plan.types import PlanCounts
from tests.hierarchy.numpy_adapt import Moves, shrunk

GEOMETRY = Geometry(
    row=RowFormat(width=4, value_width=4, dtype="float32"),
    layers_per_pool=(1,),
    top_k=4,
    index_width=2,
    index_dtype="float32",
    scale=1.0,
)
LONG = 60


@dataclasses.dataclass(frozen=True)
class Small:
    """A hierarchy of one pool; by default of 9 pages for 3 requests."""

    policy: str = "adaptive"
    moves: int = 4
    requests: int = 3
    capacity: int = 64
    hot_rows: int = 12

    @property
    def cfg(self):
        return HierarchyConfig(
            geometry=GEOMETRY,
            policy=Policy(self.policy),
            requests=self.requests,
            capacity=self.capacity,
            hot_rows=self.hot_rows,
            moves_per_step=self.moves,
        )


def prepared(cfg, held, rates, lengths, saved, tried):
    """A state with given budgets, rates of misses and sums of ghosts; every page is full."""
    state = dataclasses.replace(init(cfg), length=lengths, active=lengths > 0)
    state = set_budgets(state, cfg, held[None])
    full = jnp.repeat(jnp.minimum(state.hot[0].owner, 0), cfg.page_slots)
    state = with_hot(state, 0, dataclasses.replace(state.hot[0], position=full))
    place = jnp.arange(cfg.capacity, dtype=jnp.int32)[None]
    state = with_pool(state, 0, slot_of=jnp.where(place < held[:, None] * cfg.page_slots, 0, -1))
    benefit = dataclasses.replace(state.benefit, saved=saved[None], tried=tried[None])
    full = jnp.minimum(held * cfg.page_slots, cfg.capacity)[None]
    return dataclasses.replace(state, miss_rate=rates[None], benefit=benefit, hot_records=full)


def counted(state, selected, fetched):
    """A state in whose last step so many records were selected and fetched."""
    none = jnp.zeros_like(fetched)
    counts = PlanCounts(*(leaf[None] for leaf in (selected, none, none, fetched, none)))
    return dataclasses.replace(state, counts=counts)


@cache
def compiled(small):
    cfg = small.cfg

    def run(held, rates, lengths, saved, tried, selected, fetched):
        state = prepared(cfg, held, rates, lengths, saved, tried)
        state = adapt(counted(state, selected, fetched), cfg)
        benefit = state.benefit
        return (
            state.budget[0],
            (state.miss_rate[0], benefit.tried[0], benefit.saved[0]),
            (state.hot[0].owner >= 0).sum(),
        )

    return jax.jit(run)


@cache
def joining(small):
    cfg = small.cfg

    def run(held, rates, lengths, saved, tried, row, length):
        state = prepared(cfg, held, rates, lengths, saved, tried)
        state = requests.join(state, cfg, row, length)
        return state.budget[0], state.miss_rate[0]

    return jax.jit(run)


ids = partial(jnp.asarray, dtype=jnp.int32)
floats = partial(jnp.asarray, dtype=jnp.float32)


def adapted(held, rates, lengths=None, *, saved=None, tried=None, small=None, **sizes):
    """Budgets after one step; `rates` are the moving averages after it."""
    small = small or Small(**sizes)
    zeros = [0] * small.requests
    lengths = lengths or [LONG] * small.requests
    before = floats(rates) / DECAY
    sums = floats(saved or zeros) / DECAY, floats(tried or zeros) / DECAY
    took_part = ids([GEOMETRY.top_k] * small.requests)
    budget, _, owned = compiled(small)(
        ids(held), before, ids(lengths), *sums, took_part, ids(zeros)
    )
    assert owned == budget.sum()
    return tuple(budget.tolist())


def test_sizes():
    cfg = Small().cfg
    assert (cfg.page_slots, cfg.floor_pages(0), cfg.share_pages(0), cfg.ghosts) == (4, 1, 3, 16)
    assert Small("fixed").cfg.ghosts == 0


def test_free_pages_go_also_to_who_misses_nothing_yet():
    """So that a history which fits is not evicted before it is missed."""
    assert adapted((3, 1, 1), (0, 0, 0), (12, 8, 2)) == (4, 2, 1)
    assert adapted((4, 2, 1), (0, 0, 0), (12, 8, 2)) == (4, 3, 1)
    assert adapted((4, 3, 1), (0, 0, 0), (12, 8, 2)) == (4, 3, 1)


def test_idle_pages_are_dealt_evenly():
    """Not to the lowest row first: whoever holds least values a page most."""
    assert adapted((1, 1, 1), (0, 0, 0), moves=2) == (2, 2, 1)
    assert adapted((2, 2, 2), (0, 0, 0), moves=6) == (3, 3, 3)


def test_without_misses_nobody_gives():
    assert adapted((6, 2, 1), (0, 0, 0)) == (6, 2, 1)


def test_who_misses_nothing_keeps_pages_that_the_other_hardly_needs():
    """What misses nothing is taken to fetch one record now and then, so it is not free to take."""
    one = 1 - DECAY
    # 1 record now and then on 2 pages, and 3.9 on 6: not 1.5 times as much per page.
    assert adapted((2, 6, 1), (0, 2.9 * one, 0), moves=1) == (2, 6, 1)
    assert adapted((4, 4, 1), (0, 8 * one, 0), moves=1) == (3, 5, 1)


def test_grows_into_free_pages_by_the_bound():
    assert adapted((1, 1, 1), (0, 16, 0)) == (1, 5, 1)
    assert adapted((1, 1, 1), (0, 16, 0), moves=1) == (1, 2, 1)


def test_grows_no_faster_than_it_can_fill():
    """It holds a full page of 4 records, and 5 come in the next step: 3 pages."""
    assert adapted((1, 4, 4), (5, 0, 0)) == (3, 3, 3)
    assert adapted((1, 4, 4), (4, 0, 0)) == (2, 3, 4)


def test_grows_as_far_as_the_history_is_long():
    # 10 positions and the next one fill 3 pages of 4.
    assert adapted((1, 1, 1), (9, 0, 0), (10, 2, 2)) == (3, 1, 1)
    assert adapted((1, 1, 1), (9, 0, 0), (11, 2, 2)) == (3, 1, 1)
    assert adapted((1, 1, 1), (9, 0, 0), (12, 2, 2)) == (4, 1, 1)


def test_pages_go_where_they_save_most():
    # The first saves 8 by a page, then 2.7, 1.3 and 0.8; the second 1.
    assert adapted((1, 1, 1), (16, 2, 0)) == (4, 2, 1)


def test_what_was_seen_counts_more_than_the_misses():
    """Row 1 misses less, but what it misses would have been there with a page more."""
    assert adapted((4, 4, 1), (12, 4, 0), moves=1) == (5, 3, 1)
    seen = {"saved": (10, 400, 0), "tried": (80, 80, 0)}
    assert adapted((4, 4, 1), (12, 4, 0), moves=1, **seen) == (3, 5, 1)


def test_who_misses_nothing_stands_in_nobodys_way():
    """Row 2 has one page and would value a second most, if it missed anything."""
    seen = {"saved": (400, 1, 0), "tried": (80_000, 80_000, 0)}
    assert adapted((4, 4, 1), (1, 1, 0), moves=1, **seen) == (5, 3, 1)


@pytest.mark.parametrize(("saved", "after"), [(248, (4, 4, 1)), (256, (5, 3, 1))])
def test_trades_only_for_half_as_much_again(saved, after):
    """The other one would lose 5 / 3 of what a page more would save it: c / 12 against c / 20."""
    seen = {"saved": (saved, 100, 0), "tried": (10_000, 10_000, 0)}
    assert adapted((4, 4, 1), (1, 1, 0), moves=1, **seen) == after


@pytest.mark.parametrize("seed", range(20))
def test_pages_come_to_rest(seed):
    """With few pages each, where a page changes values most; more moves than it takes, one more."""
    rng = np.random.default_rng(seed)
    held = tuple((1 + rng.multinomial(6, [1 / 3] * 3)).tolist())
    rates = rng.gamma(0.5, 20, 3).tolist()
    seen = {"saved": rng.gamma(0.5, 40, 3).tolist(), "tried": rng.uniform(0, 80, 3).tolist()}
    rested = [adapted(held, rates, moves=moves, **seen) for moves in (40, 41)]
    assert rested[0] == rested[1]


def test_equals_never_trade():
    assert adapted((3, 3, 3), (5, 5, 5)) == (3, 3, 3)


def test_never_below_the_floor():
    assert adapted((7, 1, 1), (9, 0, 0)) == (7, 1, 1)
    assert adapted((6, 2, 1), (99, 0, 0)) == (7, 1, 1)


def test_absent_requests_get_nothing():
    assert adapted((1, 0, 0), (16, 9, 9), (LONG, 0, 0)) == (5, 0, 0)


@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.RESIDENT])
def test_other_policies_keep_their_budgets(policy):
    assert adapted((3, 3, 0), (9, 1, 0), (LONG, LONG, 0), policy=policy) == (3, 3, 0)


def test_miss_rate_is_a_moving_average_of_fetches():
    zeros = floats([0, 0, 0])
    rates, fetched = floats([2.0, 0.0, 7.0]), ids([4, 10, 0])
    _, (rate, _, _), _ = compiled(Small(moves=1))(
        ids([3, 3, 0]), rates, ids([10, 10, 0]), zeros, zeros, ids([4, 4, 0]), fetched
    )
    wanted = [DECAY * 2 + (1 - DECAY) * 4, (1 - DECAY) * 10, 0]
    np.testing.assert_allclose(rate, wanted, rtol=1e-6)


def test_a_step_says_nothing_of_who_takes_no_part():
    """Row 1 is in prefill: what is known of it stays, to the bit. Row 2 is nobody's."""
    known = floats([2.0, 5.0, 7.0]), floats([30.0, 40.0, 0.0]), floats([3.0, 6.0, 0.0])
    rates, saved, tried = known
    lengths, selected, fetched = ids([10, 10, 0]), ids([4, 0, 0]), ids([4, 0, 0])
    _, after, _ = compiled(Small())(ids([3, 3, 0]), rates, lengths, saved, tried, selected, fetched)
    assert [float(leaf[1]) for leaf in after] == [5.0, 6.0, 40.0]
    assert [float(leaf[2]) for leaf in after] == [0.0, 0.0, 0.0]
    wanted = [DECAY * 2 + (1 - DECAY) * 4, DECAY * 3, DECAY * 30]
    np.testing.assert_allclose([leaf[0] for leaf in after], wanted, rtol=1e-6)


def test_who_is_in_prefill_keeps_its_pages():
    """200 steps of two others, who miss as much as is expected of the newcomer."""
    cfg = Small().cfg
    zeros, selected, fetched = floats([0, 0, 0]), ids([4, 4, 0]), ids([3, 3, 0])

    def run(held, rates, lengths):
        state = prepared(cfg, held, rates, lengths, zeros, zeros)
        state = requests.join(state, cfg, jnp.int32(2), jnp.int32(LONG))

        def step(_, state):
            return adapt(counted(state, selected, fetched), cfg)

        return state.budget[0], jax.lax.fori_loop(0, 200, step, state).budget[0]

    before, after = jax.jit(run)(ids([5, 4, 0]), floats([3, 3, 0]), ids([LONG, LONG, 0]))
    assert before.tolist() == after.tolist() == [3, 3, 3]


LARGE = Small(requests=3, capacity=16384, hot_rows=2732, moves=4)
"""2,049 pages of 4 slots: 8 are free below the low watermark, 16 above the high one."""


@pytest.mark.parametrize(
    ("free", "change"),
    [(5, -3), (7, -1), (8, 0), (16, 0), (17, 1), (19, 3), (100, 4), (0, -4)],
)
def test_watermarks(free, change):
    """Between them nothing moves: what an admission has taken is not taken back at once."""
    held, rates = (2049 - free - 1000, 1000, 0), (5, 5, 0)
    after = adapted(held, rates, (16000, 16000, 0), small=LARGE)
    assert sum(after) - sum(held) == change


def test_no_reserve_when_every_row_is_taken():
    held = (700, 700, 646)
    after = adapted(held, (5, 5, 5), (16000,) * 3, small=LARGE)
    assert sum(after) == 2049


def joined(held, rates, length, **sizes):
    """Budgets and rates after a request has joined the last row."""
    small = Small(**sizes)
    zeros = floats([0] * small.requests)
    lengths = ids([LONG if pages else 0 for pages in held])
    budget, rate = joining(small)(
        ids(held), floats(rates), lengths, zeros, zeros, jnp.int32(2), jnp.int32(length)
    )
    return tuple(budget.tolist()), rate


def test_newcomer_takes_from_those_who_value_pages_least():
    # An even share is 3 pages, one is free. At 4 pages each they value them as 1 to 16 do.
    assert joined((4, 4, 0), (1, 16, 0), LONG)[0] == (2, 4, 3)


def test_newcomer_gets_what_is_free_as_far_as_it_can_use_it():
    assert joined((1, 0, 0), (1, 0, 0), LONG)[0] == (1, 0, 8)
    assert joined((1, 0, 0), (1, 0, 0), 10)[0] == (1, 0, 3)


def test_newcomer_is_expected_to_miss_as_the_others_do():
    """They would miss 8 and 16 with one page, so with 3 it misses 4."""
    budget, rate = joined((2, 2, 0), (4, 8, 0), LONG)
    assert budget == (2, 2, 5)
    np.testing.assert_allclose(rate, [4, 8, 12 / 5], rtol=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_model(seed):
    """Random budgets, rates and ghosts of 8 requests; the model moves one page at a time."""
    rng = np.random.default_rng(seed)
    small = Small(requests=8, capacity=512, hot_rows=60, moves=int(rng.integers(1, 40)))
    total, floor = 8 * 15, 1
    active = rng.random(8) < 0.8
    spread = rng.multinomial(rng.integers(0, total - 8 + 1), rng.dirichlet(np.ones(8)))
    held = np.where(active, floor + spread, 0)
    lengths = np.where(active, rng.integers(100, 500, 8), 0)
    rates = np.where(active, rng.gamma(0.5, 20, 8), 0)
    tried, saved = rng.uniform(0, 80, 8), rng.gamma(0.5, 40, 8)
    history, fillable = -(-(lengths + 1) // 4), held + -(-np.maximum(rates, 1) // 4).astype(int)
    value = (saved + PRIOR * (rates + 1 - DECAY) / (held + 1)) / (tried + PRIOR)
    model = Moves(
        held=dict(enumerate(held.tolist())),
        value=dict(enumerate(value.tolist())),
        useful=dict(enumerate(np.minimum(history, fillable).tolist())),
        floor=floor,
        active=dict(enumerate(active.tolist())),
        misses=dict(enumerate((rates > 1.5 * (1 - DECAY)).tolist())),
    )
    wanted = model.run(small.moves, total, 0, 0)
    found = adapted(
        held, rates, lengths.tolist(), saved=list(saved), tried=list(tried), small=small
    )
    assert model.margin > 1e-5
    assert dict(enumerate(found)) == wanted


@pytest.mark.parametrize("seed", range(10))
def test_admission_equals_the_model(seed):
    rng = np.random.default_rng(seed)
    held = np.array([*rng.multinomial(9, [0.5, 0.5]), 0])
    held[:2] = np.clip(held[:2], 1, 8)
    rates = np.array([*rng.gamma(0.5, 20, 2), 0])
    value = dict(enumerate((rates + 1 - DECAY) / (held + 1)))
    wanted = shrunk({0: int(held[0]), 1: int(held[1])}, value, 1, 6)
    found, _ = joined(held, rates, LONG)
    assert found[2] == 3
    assert max(abs(found[row] - wanted[row]) for row in (0, 1)) <= 1
