"""Retrieval and attention in one launch on a GPU, against the two kernels one after the other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve_attend import api, mosaic
from pallas_kernels.retrieve_attend.cases import CASES, random
from pallas_kernels.sparse_attention import mosaic as attention_mosaic
from pallas_kernels.sparse_attention.cases import fp8, glm
from pallas_kernels.sparse_attention.mosaic import Tuning
from tests.support.attention import assert_close, options
from tests.support.retrieve_attend import arguments, assert_same, refusal, run_fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]

fused = partial(api.retrieve_attend, backend="mosaic")


def in_turn(host, slots, fetches, attention, moves=None, **how):
    """The two kernels, one after the other."""
    slots = retrieve(host, slots, fetches, moves)
    query, location, _ = attention
    return attention_mosaic.sparse_attention(query, slots, location, **how), slots


@pytest.mark.parametrize("name", CASES)
def test_shared_cases(name):
    inputs = CASES[name]()
    if refusal(inputs) is not None:
        # Then the default is one operation after the other, each by the kernel that takes it.
        found = run_fused(inputs)
    else:
        found = run_fused(inputs, fused)
        assert_same(found, run_fused(inputs, in_turn))
    np.testing.assert_array_equal(found[2], inputs.after.slots)
    if name != "position_out_of_range":
        assert_close(inputs.after, found[:2])
    else:
        assert np.isnan(found[0][0].astype(np.float32)).all()
        assert np.isfinite(found[0][1].astype(np.float32)).all()


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("rows", [glm, fp8])
def test_any_split_is_the_same(rows, splits):
    # With 8 splits there are parts that select nothing, and parts with nothing to fetch.
    inputs = random(rows=rows, layer=2, heads=64, top_k=1000, selected=(1000, 3, 0))
    how = {"tuning": Tuning(splits)}
    found = run_fused(inputs, mosaic.retrieve_attend, **how)
    assert_same(found, run_fused(inputs, in_turn, **how))
    np.testing.assert_array_equal(found[2], inputs.after.slots)
    assert_close(inputs.after, found[:2])


def test_the_pool_stays_on_the_host_and_the_slots_where_they_are():
    inputs = CASES["glm_group"]()
    host, slots, *rest = arguments(inputs)
    assert host.sharding.memory_kind == "pinned_host"
    call = jax.jit(partial(fused, **options(inputs.after)), donate_argnums=1)
    compiled = call.lower(host, slots, *rest).compile()
    memory = compiled.memory_analysis()
    assert memory.host_temp_size_in_bytes == 0, "the host pool is copied on the host"
    assert memory.temp_size_in_bytes < slots.nbytes, "a pool is copied to or on the device"
    where = slots.unsafe_buffer_pointer()
    _, result = compiled(host, slots, *rest)
    assert slots.is_deleted()
    assert result.unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(np.asarray(result), inputs.after.slots)
    np.testing.assert_array_equal(np.asarray(host), inputs.host)


def test_runs_are_bitwise_equal():
    """A row that is read before its record is there would show as a difference between runs."""
    inputs = random(heads=64, top_k=2048, selected=(2048,) * 32)
    host, slots, *rest = arguments(inputs)
    call = jax.jit(partial(fused, **options(inputs.after)), donate_argnums=1)
    runs = [call(host, jnp.copy(slots), *rest) for _ in range(20)]
    (values, lse), first = runs[0]
    assert bool(jnp.array_equal(first, inputs.after.slots))
    assert jnp.isfinite(values.astype(jnp.float32)).all()
    for (again, again_lse), result in runs[1:]:
        assert jnp.array_equal(values, again)
        assert jnp.array_equal(lse, again_lse)
        assert jnp.array_equal(first, result)


def test_a_scan_may_close_over_the_host_pool():
    """Each turn brings every record to another slot, so a turn that is late or early shows."""
    inputs = random(layer=3, selected=(150, 150), missing=1.0)
    how = options(inputs.after)

    def turn(call, host, fetches, attention, slots, number):
        location = jnp.roll(attention.location, number, axis=2)
        moved = fetches._replace(targets=location[:, 0])
        query = attention.query * (1 + number).astype(attention.query.dtype)
        attention = attention._replace(query=query, location=location)
        attended, slots = call(host, slots, moved, attention, **how)
        return slots, attended

    def scanned(host, slots, fetches, attention):
        step = partial(turn, fused, host, fetches, attention)
        return jax.lax.scan(step, slots, jnp.arange(4, dtype=jnp.int32))

    host, slots, *rest, _ = arguments(inputs)
    single = jax.jit(partial(turn, in_turn))
    wanted, after = [], jnp.copy(slots)
    for number in range(4):
        after, attended = single(host, *rest, after, jnp.int32(number))
        wanted.append(attended)
    compiled = jax.jit(scanned, donate_argnums=1).lower(host, slots, *rest).compile()
    memory = compiled.memory_analysis()
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < slots.nbytes, "a pool is copied in every turn"
    result, found = compiled(host, slots, *rest)
    stacked = [np.stack(each) for each in zip(*jax.tree.map(np.asarray, wanted), strict=True)]
    assert_same(map(np.asarray, (*found, result)), (*stacked, np.asarray(after)))
    assert not np.array_equal(stacked[0][0], stacked[0][3])


def test_a_pool_of_more_words_than_32_bits_count():
    """The last record of 8.6 GB; a 32-bit offset would read zeros."""
    inputs = random(layer=3, top_k=64, selected=(64,), missing=1.0)
    records = 2**31 // inputs.host.shape[1] + 100
    host = np.zeros((records, inputs.host.shape[1]), np.int32)
    host[-len(inputs.host) :] = inputs.host
    shift = records - len(inputs.host)
    fetches = inputs.fetches._replace(rows=inputs.fetches.rows + shift)
    far = inputs._replace(host=host, fetches=fetches)
    assert_same(run_fused(far, fused), run_fused(inputs, fused))
