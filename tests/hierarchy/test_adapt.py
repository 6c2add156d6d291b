"""Adaptive residency, move by move: 9 pages of 4 slots for 3 requests in one pool, floor 1."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.config import Geometry, HierarchyConfig, Policy, RowFormat
from dhisparse_jax.hierarchy.adapt import DECAY, adapt
from dhisparse_jax.hierarchy.pages import set_budgets
from dhisparse_jax.hierarchy.state import init
from pallas_kernels.plan.types import PlanCounts

GEOMETRY = Geometry(
    row=RowFormat(width=4, value_width=4, dtype="float32"),
    layers_per_pool=(1,),
    top_k=4,
    index_width=2,
    index_dtype="float32",
    scale=1.0,
)
LONG = 60


@cache
def compiled(policy, moves):
    cfg = HierarchyConfig(
        geometry=GEOMETRY,
        policy=policy,
        requests=3,
        capacity=64,
        hot_rows=12,
        moves_per_step=moves,
    )

    def run(held, rates, lengths, fetched):
        state = dataclasses.replace(init(cfg), length=lengths, active=lengths > 0)
        state = set_budgets(state, cfg, held[None])
        none = jnp.zeros((1, 3), jnp.int32)
        counts = PlanCounts(none, none, none, fetched[None], none)
        state = dataclasses.replace(state, miss_rate=rates[None], counts=counts)
        state = adapt(state, cfg)
        return state.budget[0], state.miss_rate[0], (state.hot[0].owner >= 0).sum()

    return cfg, jax.jit(run)


def adapted(held, rates, lengths=(LONG,) * 3, *, moves=4, policy=Policy.ADAPTIVE):
    """Budgets after one step."""
    _, run = compiled(policy, moves)
    zeros = jnp.zeros(3, jnp.int32)
    ids = lambda values: jnp.asarray(values, jnp.int32)
    budget, _, owned = run(ids(held), jnp.asarray(rates, jnp.float32), ids(lengths), zeros)
    assert owned == budget.sum()
    return tuple(budget.tolist())


def test_sizes():
    cfg, _ = compiled(Policy.ADAPTIVE, 4)
    assert (cfg.page_slots, cfg.floor_pages, cfg.share_pages) == (4, 1, 3)


def test_free_pages_go_also_to_who_misses_nothing_yet():
    """So that a history which fits is not evicted before it is missed."""
    assert adapted((3, 1, 1), (0, 0, 0), (12, 8, 2)) == (4, 3, 1)
    assert adapted((4, 3, 1), (0, 0, 0), (12, 8, 2)) == (4, 3, 1)


def test_without_misses_nobody_gives():
    assert adapted((6, 2, 1), (0, 0, 0)) == (6, 2, 1)


def test_grows_into_free_pages_by_the_bound():
    assert adapted((1, 1, 1), (0, 2, 0)) == (1, 5, 1)
    assert adapted((1, 1, 1), (0, 2, 0), moves=1) == (1, 2, 1)


def test_one_page_in_eight_stays_free():
    # Two of the three free pages go, and nobody here values a page twice as much as another.
    assert adapted((2, 2, 2), (3, 3, 3)) == (3, 3, 2)


def test_grows_as_far_as_the_history_is_long():
    # 10 positions and the next one fill 3 pages of 4.
    assert adapted((1, 1, 1), (9, 0, 0), (10, 2, 2)) == (3, 1, 1)
    assert adapted((1, 1, 1), (9, 0, 0), (11, 2, 2)) == (3, 1, 1)
    assert adapted((1, 1, 1), (9, 0, 0), (12, 2, 2)) == (4, 1, 1)


def test_pages_go_where_they_save_most():
    # Values 6 and 2; then 3 and 2; then 2 and 2, where the first wins the tie; then 1.5 and 2.
    assert adapted((1, 1, 1), (6, 2, 0)) == (4, 2, 1)


def test_takes_from_whoever_misses_least():
    # No page is free. Values .25 and .25 give to 8, 4, 2.67, 2: twice each.
    assert adapted((1, 4, 4), (8, 1, 1)) == (5, 2, 2)
    assert adapted((1, 4, 4), (8, 1, 1), moves=1) == (2, 3, 4)


@pytest.mark.parametrize(("rate", "after"), [(3.9, (4, 4, 1)), (4.1, (5, 3, 1))])
def test_trades_only_for_twice_the_value(rate, after):
    # A page of request 1 is worth 2 / 4; request 0 must value it at more than 1.
    assert adapted((4, 4, 1), (rate, 2, 0), moves=1) == after


def test_equals_never_trade():
    assert adapted((3, 3, 3), (5, 5, 5)) == (3, 3, 3)


def test_never_below_the_floor():
    assert adapted((7, 1, 1), (9, 0, 0)) == (7, 1, 1)
    assert adapted((6, 2, 1), (99, 0, 0)) == (7, 1, 1)


def test_absent_requests_get_nothing():
    assert adapted((1, 0, 0), (1, 9, 9), (LONG, 0, 0)) == (5, 0, 0)


@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.RESIDENT])
def test_other_policies_keep_their_budgets(policy):
    assert adapted((3, 3, 0), (9, 1, 0), (LONG, LONG, 0), policy=policy) == (3, 3, 0)


def test_miss_rate_is_a_moving_average_of_fetches():
    _, run = compiled(Policy.ADAPTIVE, 4)
    ids = lambda *values: jnp.asarray(values, jnp.int32)
    rates = jnp.asarray([2.0, 0.0, 7.0])
    _, rate, _ = run(ids(1, 1, 0), rates, ids(LONG, LONG, 0), ids(4, 10, 0))
    wanted = [DECAY * 2 + (1 - DECAY) * 4, (1 - DECAY) * 10, 0]
    np.testing.assert_allclose(rate, wanted, rtol=1e-6)
