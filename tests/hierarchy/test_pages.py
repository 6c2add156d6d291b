"""Pages of pools whose records stand for different numbers of positions, in one hot pool."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax import Geometry, HierarchyConfig, Policy, RowFormat
from dhisparse_jax.hierarchy import admit_prompt, check_invariants, init, join, leave
from dhisparse_jax.hierarchy.group import open_selected


def config(policy, hot_rows, *, capacity=66, rates=(2, 1), queries=1):
    geometry = Geometry(
        row=RowFormat.mla(6, 2, "float32"),
        layers_per_pool=(1,) * len(rates),
        rates=rates,
        top_k=16,
        scale=1.0,
    )
    return HierarchyConfig(
        geometry=geometry,
        policy=Policy(policy),
        requests=2,
        capacity=capacity,
        hot_rows=hot_rows,
        queries=queries,
    )


@pytest.mark.parametrize("rates", [(1,), (2, 1), (4, 1, 2)])
def test_no_budget_is_more_than_a_history(rates):
    """And none loses a slot, whatever it is."""
    for capacity, queries, policy in itertools.product((64, 100), (1, 3), ("fixed", "adaptive")):
        for hot_rows in range(1, capacity + 3):
            cfg = config(policy, hot_rows, capacity=capacity, rates=rates, queries=queries)
            for pool in range(cfg.pools):
                assert cfg.share_pages(pool) * cfg.page_slots == cfg.hot_slots(pool)
                assert cfg.floor_pages(pool) <= cfg.share_pages(pool) <= cfg.max_pages(pool)
                assert min(hot_rows, cfg.records(pool)) <= cfg.hot_slots(pool)


@pytest.mark.parametrize("hot_rows", [40, 51])
def test_pages_come_back_from_pools_of_every_rate(hot_rows):
    """One pool keeps all of its records, and the other does not."""
    cfg = config("fixed", hot_rows)
    enter = jax.jit(lambda state, row: join(state, cfg, row, jnp.int32(60)), donate_argnums=0)
    go = jax.jit(lambda state, row: leave(state, cfg, row), donate_argnums=0)
    fill = [
        jax.jit(partial(_filled, cfg=cfg, pool=pool), donate_argnums=0) for pool in range(cfg.pools)
    ]
    select = jax.jit(lambda state, chosen: open_selected(state, cfg, 1, chosen))
    row, state = jnp.int32(0), init(cfg)
    first = jnp.arange(16, dtype=jnp.int32)[None, None]
    chosen = jnp.concatenate((first, jnp.full_like(first, -1)))
    for _ in range(8):
        state = enter(state, row)
        for each in fill:
            state = each(state, row)
        opened = select(state, chosen)
        assert all(check_invariants(state, cfg).values())
        assert (np.asarray(opened.plan.location)[0] >= 0).all()
        state = go(state, row)
    assert (np.asarray(state.hot[0].owner) >= 0).sum() == 0


def _filled(state, row, *, cfg, pool):
    """With a prompt's records in one pool."""
    records = jnp.zeros((cfg.records(pool), *cfg.record_shape(pool)), jnp.int32)
    return admit_prompt(state, cfg, pool, row, records, ())
