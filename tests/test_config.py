"""Sizes that follow from a configuration, and configurations that are refused."""

import dataclasses
import itertools

import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry, RowFormat
from dhisparse_jax.hierarchy import layout
from tests.hierarchy.numpy_model import Sizes

GEOMETRY = Geometry(
    row=RowFormat(width=12, value_width=8, dtype="float32"),
    layers_per_pool=(1, 4, 2, 3),
    top_k=8,
    index_width=4,
    index_dtype="float32",
    scale=1.0,
)


def config(policy="fixed", **sizes):
    sizes = {"requests": 3, "capacity": 50, "hot_rows": 12, **sizes}
    return HierarchyConfig(geometry=GEOMETRY, policy=Policy(policy), **sizes)


@pytest.mark.parametrize("policy", [policy.value for policy in Policy])
@pytest.mark.parametrize("capacity", [8, 16, 50, 64])
def test_sizes_equal_the_model(policy, capacity):
    for hot_rows, queries in itertools.product([1, 3, 4, 6, 8, 15, 16, 24, 49, 50, 99], [1, 3]):
        cfg = config(policy, capacity=capacity, hot_rows=hot_rows, queries=queries)
        sizes = Sizes(cfg)
        assert cfg.page_slots == sizes.page
        assert cfg.share_pages(0) == sizes.share
        assert cfg.floor_pages(0) == sizes.floor
        assert cfg.max_pages(0) == sizes.max_pages
        assert cfg.staging(0) == sizes.staging
        assert [list(members) for members in cfg.hot_pools] == sizes.hot
        assert [cfg.record_words(pool) for pool in range(cfg.pools)] == sizes.words
        for hot in range(len(sizes.hot)):
            assert layout.slots(cfg, hot) == sizes.slots(hot)


@pytest.mark.parametrize("policy", [policy.value for policy in Policy])
@pytest.mark.parametrize("hot_rows", [1, 3, 8, 24, 47, 48, 49, 1000])
def test_working_set_always_fits(policy, hot_rows):
    """Floor and staging together hold the largest working set; nobody can hold too many pages."""
    cfg = config(policy, hot_rows=hot_rows, queries=3)
    assert cfg.floor_pages(0) * cfg.page_slots + cfg.staging(0) >= cfg.working_set
    assert cfg.floor_pages(0) <= cfg.share_pages(0) <= cfg.max_pages(0)
    assert cfg.share_pages(0) * cfg.page_slots >= min(hot_rows, cfg.capacity)


def test_glm_sizes():
    """GLM-5.3 in bf16: rows of 1,152 bytes, groups of 1, 1 and 19 times 4 layers."""
    geometry = dataclasses.replace(
        GEOMETRY,
        row=RowFormat(width=576, value_width=512, dtype="bfloat16"),
        layers_per_pool=(1, 1, *[4] * 19),
    )
    cfg = HierarchyConfig(
        geometry=geometry, policy=Policy.FIXED, requests=16, capacity=100_000, hot_rows=4096
    )
    assert [4 * cfg.record_words(pool) for pool in (0, 1, 2)] == [1152, 1152, 4608]
    assert cfg.hot_pools == ((0, 1), tuple(range(2, 21)))
    assert cfg.hot_pool_of(2) == (1, 0)
    assert (cfg.page_slots, cfg.share_pages(0)) == (16, 256)


def test_equal_configurations_are_one_key():
    assert hash(config()) == hash(config())
    assert config() == config()


@pytest.mark.parametrize("name", ["requests", "capacity", "queries", "hot_rows"])
def test_sizes_below_one(name):
    with pytest.raises(UserError, match=f"{name} is 0; it must be at least 1"):
        config(**{name: 0})


def test_capacity_below_k():
    config(capacity=8)
    with pytest.raises(UserError, match="selects 8 positions, but the capacity is 7"):
        config(capacity=7)


def test_tail_below_two_steps():
    config(queries=3, tail=6)
    with pytest.raises(UserError, match=r"tail of 5 cannot hold 3 verify queries.*at least 6"):
        config(queries=3, tail=5)


def test_no_such_pool():
    with pytest.raises(IndexError, match="no pool 4; there are 4"):
        config().hot_pool_of(4)
