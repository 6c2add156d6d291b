"""Sizes are those of the arrays, and too little memory is a clear message."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dhisparse_jax.engine import memory
from dhisparse_jax.engine.memory import Sizes, check_memory, default_hot_rows, sizes
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.state import HOST_KIND, host_sharding, init
from tests.support.serving import POLICIES, config, engine, model, prompt


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_sizes_are_those_of_the_arrays(policy):
    cfg = config(*policy)
    state, of = init(cfg), sizes(cfg)
    assert of.host_bytes == size([(pool.host, pool.host_keys) for pool in state.pools])
    assert of.index_bytes == size([pool.index_keys for pool in state.pools])
    slots = size([hot.slots for hot in state.hot])
    assert of.hot_bytes + of.tail_bytes + of.staging_bytes == slots
    assert sum(dataclasses.astuple(of)) == size(state)
    assert of.device_bytes == size(state) - of.host_bytes


def test_regions_by_hand():
    """3 requests, 2 pools, 128-byte records: 4 hot slots, 4 in the tail, 8 - 4 staged."""
    of = sizes(config("fixed", 4))
    assert (of.hot_bytes, of.tail_bytes) == (3 * 2 * 4 * 128, 3 * 2 * 4 * 128)
    assert of.staging_bytes == 3 * 4 * 128
    assert of.host_bytes == 3 * 96 * 2 * (128 + 128)


def test_engine_reports_its_sizes():
    found = engine("fixed", 4).sizes
    assert found == sizes(config("fixed", 4), prefill_bytes=found.prefill_bytes)


def test_a_prompt_by_hand():
    """96 positions of 24 float32 numbers and a token id; 112 records and keys of one pool."""
    hidden, group = 96 * (4 * 24 + 4) + 4, 112 * (128 + 4 * 6) + 4
    assert engine("fixed", 4).sizes.prefill_bytes == hidden + group


def test_a_prompt_takes_as_much_as_is_counted(monkeypatch):
    """The most of all arrays that there are in a prefill, beside those before it."""
    served = engine("fixed", 4)
    begin, most = served.compiled.begin_prompt, []
    here = lambda: sum(array.nbytes for array in jax.live_arrays())

    def measured(*arguments):
        prompt = begin(*arguments)
        most.append(here())
        return prompt

    monkeypatch.setattr(served.compiled, "begin_prompt", measured)
    list(served.prefill(0, 0, prompt(40)))
    served.leave(0)
    most.clear()
    gc.collect()
    before = here()
    pieces = served.prefill(0, 0, prompt(40))
    for _ in pieces:
        most.append(here())
    assert max(most) - before == served.sizes.prefill_bytes
    served.leave(0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_regions_do_not_overlap(policy):
    """Every slot belongs to one page, one place in one tail, or one staging place."""
    cfg = config(*policy)
    seen = list(range(layout.page_region(cfg, 0)))
    grid = jax.numpy.indices((cfg.requests, cfg.tail))
    for pool in range(cfg.pools):
        seen += layout.tail_slot(cfg, pool, *grid).reshape(-1).tolist()
    seen += layout.staging_slots(cfg, 0).reshape(-1).tolist()
    assert sorted(seen) == list(range(layout.slots(cfg, 0)))


def test_too_little_device_memory(monkeypatch):
    cfg = config("fixed", 4)
    needed = sizes(cfg).device_bytes
    monkeypatch.setattr(memory, "free_device_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match=r"state and a prompt .* need .* of device.*lower --batch"):
        check_memory(cfg)
    monkeypatch.setattr(memory, "free_device_bytes", lambda: needed)
    assert check_memory(cfg) == sizes(cfg)


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("hot_bytes", r"9\.00 GiB of it are pages: lower --hot-rows \(now 4\), or lower --batch"),
        ("index_bytes", r"index keys: shorten the texts \(room for 96 .* --index-format fp8, or"),
        ("table_bytes", "tables and windows: shorten the texts"),
        ("staging_bytes", r"use a shorter --draft-length \(now 3\) or --draft none"),
        (
            "prefill_bytes",
            r"of it are a prompt in prefill: shorten the texts \(room for 96",
        ),
    ],
)
def test_what_needs_most_says_what_to_change(monkeypatch, part, remedy):
    cfg = dataclasses.replace(config("fixed", 4), queries=4, tail=8)
    large = dataclasses.replace(sizes(cfg), **{part: 9 << 30})
    monkeypatch.setattr(memory, "sizes", lambda *_: large)
    monkeypatch.setattr(memory, "free_device_bytes", lambda: 0)
    with pytest.raises(UserError, match=remedy):
        check_memory(cfg)


def test_too_little_host_memory(monkeypatch):
    """On a CPU the host pools share their memory with everything else."""
    cfg = config("fixed", 4)
    both = sizes(cfg).host_bytes + sizes(cfg).device_bytes
    monkeypatch.setattr(memory, "free_host_bytes", lambda: both - 1)
    with pytest.raises(
        UserError,
        match=r"host pools \(pinned_host\).*room for 96 tokens each.*lower --batch \(now 3\) or",
    ):
        check_memory(cfg)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: both)
    check_memory(cfg)


def test_on_a_gpu_the_two_memories_are_apart(monkeypatch):
    cfg = config("fixed", 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(memory, "free_host_bytes", lambda: sizes(cfg).host_bytes)
    check_memory(cfg)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: sizes(cfg).host_bytes - 1)
    with pytest.raises(UserError, match="or raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        check_memory(cfg)


def test_what_is_pinned_counts_against_the_limit(monkeypatch):
    before = memory.pinned_bytes()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, "0.5")
    assert memory.free_host_bytes() == 2**29 - before
    pinned = jax.device_put(jnp.zeros((1 << 18,), jnp.int32), host_sharding())
    mesh = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec(), memory_kind=HOST_KIND)
    same = jax.make_array_from_single_device_arrays(pinned.shape, mesh, [pinned])
    assert memory.free_host_bytes() == 2**29 - before - 2**20
    del pinned, same
    assert memory.free_host_bytes() == 2**29 - before
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, "0")
    assert memory.free_host_bytes() == 0


@pytest.mark.parametrize("value", ["64GB", "", "nan", "inf", "-1"])
def test_a_limit_that_is_no_number_is_one_line(monkeypatch, value):
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, value)
    with pytest.raises(UserError, match=f"_LIMIT_GB={value} is not a number of GB; set it to one"):
        memory.pinned_limit_bytes()


def test_default_hot_rows(monkeypatch):
    geometry = model()[0].geometry
    assert default_hot_rows(geometry, requests=3, capacity=96) == 32
    assert default_hot_rows(geometry, requests=3, capacity=20) == 20
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # Half of it holds 10 rows: 3 requests, 2 pools, 128 bytes.
    monkeypatch.setattr(memory, "free_device_bytes", lambda: 2 * 10 * 3 * 2 * 128)
    assert default_hot_rows(geometry, requests=3, capacity=96) == 10
    monkeypatch.setattr(memory, "free_device_bytes", lambda: 2 * 45 * 3 * 2 * 128)
    assert default_hot_rows(geometry, requests=3, capacity=96) == 32  # whole pages
    monkeypatch.setattr(memory, "free_device_bytes", lambda: 0)
    assert default_hot_rows(geometry, requests=3, capacity=96) == 1
    monkeypatch.setattr(memory, "free_device_bytes", lambda: 2**40)
    assert default_hot_rows(geometry, requests=3, capacity=96) == 96


def test_device_bytes_leave_out_the_host():
    assert Sizes(100, 1, 2, 3, 4, 5).device_bytes == 15
