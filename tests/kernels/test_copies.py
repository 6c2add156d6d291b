"""`retrieve` and `backup`: exact copies between host records and device slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.hierarchy.state import HOST_KIND, host_sharding
from pallas_kernels.backup import cases as backup_cases
from pallas_kernels.backup.api import backup
from pallas_kernels.retrieve import cases as retrieve_cases
from pallas_kernels.retrieve.api import retrieve


def copied(destination, source, to, from_):
    """`destination` after the copies, one at a time; negative ids on either side skip."""
    result = destination.copy()
    for target, origin in zip(to, from_, strict=True):
        if target >= 0 and origin >= 0:
            result[target] = source[origin]
    return result


def on_host(words):
    """A host pool. By way of a JAX array: an alias of NumPy's memory could not be donated."""
    return jax.device_put(jnp.array(words), host_sharding())


@pytest.mark.parametrize("name", retrieve_cases.CASES)
def test_retrieve(name):
    inputs = retrieve_cases.CASES[name]()
    slots = jax.jit(retrieve)(on_host(inputs.host), *inputs[1:])
    wanted = copied(inputs.slots, inputs.host, inputs.targets, inputs.rows)
    np.testing.assert_array_equal(slots, wanted)


@pytest.mark.parametrize("name", backup_cases.CASES)
def test_backup(name):
    inputs = backup_cases.CASES[name]()
    host = jax.jit(backup)(on_host(inputs.host), *inputs[1:])
    wanted = copied(inputs.host, inputs.slots, inputs.rows, inputs.sources)
    np.testing.assert_array_equal(host, wanted)


@pytest.mark.parametrize("name", ["glm_small", "every_slot", "everything_skipped"])
def test_retrieve_works_in_place(name):
    inputs = retrieve_cases.CASES[name]()
    host = on_host(inputs.host)
    slots = jnp.array(inputs.slots)
    where = slots.unsafe_buffer_pointer()
    result = jax.jit(retrieve, donate_argnums=1)(host, slots, inputs.rows, inputs.targets)
    assert slots.is_deleted()
    assert result.unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(host, inputs.host)


@pytest.mark.parametrize("name", ["glm_small", "every_slot", "everything_skipped"])
def test_backup_works_in_place_and_stays_on_the_host(name):
    inputs = backup_cases.CASES[name]()
    host = on_host(inputs.host)
    assert host.sharding.memory_kind == HOST_KIND
    where = host.unsafe_buffer_pointer()
    result = jax.jit(backup, donate_argnums=0)(host, *inputs[1:])
    assert host.is_deleted()
    assert result.unsafe_buffer_pointer() == where
    assert result.sharding.memory_kind == HOST_KIND


def test_backup_into_device_memory_stays_there():
    inputs = backup_cases.CASES["nothing_skipped"]()
    host = jax.jit(backup)(*inputs)
    assert host.sharding.memory_kind != HOST_KIND
