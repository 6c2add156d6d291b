"""`retrieve` and `backup` on a TPU, all cases; where there is none, interpreted, races detected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backup import api as backup_api
from pallas_kernels.backup import cases as backup_cases
from pallas_kernels.backup import launch
from pallas_kernels.backup import tpu as backup_tpu
from pallas_kernels.common import tpu_records
from pallas_kernels.retrieve import api as retrieve_api
from pallas_kernels.retrieve import cases as retrieve_cases
from pallas_kernels.retrieve import tpu as retrieve_tpu
from tests.support.copies import backed_up, retrieved
from tests.support.tpu import (
    ON_TPU,
    no_races,
    only_interpreted,
    races,
    tiled,
    tiled_host,
    without_races,
    words_in,
)

__all__ = ["no_races"]

RACING = {"one_copy_twice"}
"""Cases in which copies go to the same place at the same time, with the same bytes."""

QUICK = {"xla_backend_optimization_level": 0}


def slow_among(names, *slow):
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


@functools.partial(jax.jit, compiler_options=QUICK)
def run_retrieve(*operands):
    return retrieve_api.retrieve(*operands, backend="tpu")


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0, compiler_options=QUICK)
def run_backup(hosts, slots, rows, sources, slots_of):
    arrays = [slots[array] for array in slots_of]
    return backup_api.backup(hosts, arrays, rows, sources, backend="tpu")


def retrieve(inputs):
    slots = run_retrieve(tiled_host(inputs.host), tiled(inputs.slots), *inputs[2:])
    return words_in(slots, inputs.slots.shape[1])


def backup(inputs):
    hosts, slots = tuple(map(tiled_host, inputs.hosts)), tuple(map(tiled, inputs.slots))
    hosts = run_backup(hosts, slots, inputs.rows, inputs.sources, inputs.slots_of)
    widths = [host.shape[1] for host in inputs.hosts]
    return [words_in(host, width) for host, width in zip(hosts, widths, strict=True)]


@pytest.fixture(autouse=True)
def one_launch(monkeypatch):
    """As with jax 0.11.2 and later; before, interpreted kernels could write several pools too."""
    if not ON_TPU:
        monkeypatch.setattr(launch, "SEVERAL_RESULTS", True)


@pytest.mark.parametrize("name", retrieve_cases.CASES)
def test_retrieve(name):
    inputs = retrieve_cases.CASES[name]()
    with races() if name in RACING else without_races():
        np.testing.assert_array_equal(retrieve(inputs), retrieved(inputs))


@pytest.mark.parametrize("name", slow_among(backup_cases.CASES, "glm_small"))
def test_backup(name):
    inputs = backup_cases.CASES[name]()
    with races() if name in RACING else without_races():
        for host, wanted in zip(backup(inputs), backed_up(inputs), strict=True):
            np.testing.assert_array_equal(host, wanted)


@pytest.fixture
def changed_kernels():
    """Programs are traced anew in a test that changes kernels, and after it."""
    for clear in (run_retrieve.clear_cache, run_backup.clear_cache):
        clear()
    yield
    for clear in (run_retrieve.clear_cache, run_backup.clear_cache):
        clear()


@pytest.mark.usefixtures("no_races", "changed_kernels")
def test_few_in_flight_and_small_chunks(monkeypatch):
    """Lists of several chunks, copies that wait for earlier ones, and a launch for each pool."""
    monkeypatch.setattr(launch, "SEVERAL_RESULTS", False)
    monkeypatch.setattr(tpu_records, "IN_FLIGHT", 3)
    for module in (retrieve_tpu, backup_tpu):
        monkeypatch.setattr(module, "CHUNK", 8)
    inputs = retrieve_cases.CASES["moves"]()
    np.testing.assert_array_equal(retrieve(inputs), retrieved(inputs))
    inputs = backup_cases.CASES["slots_of_their_own"]()
    for host, wanted in zip(backup(inputs), backed_up(inputs), strict=True):
        np.testing.assert_array_equal(host, wanted)


@only_interpreted
@pytest.mark.usefixtures("no_races", "changed_kernels")
def test_a_copy_that_nobody_waits_for_has_not_happened(monkeypatch):
    monkeypatch.setattr(retrieve_tpu, "wait_all", lambda *_: None)
    inputs = retrieve_cases.CASES["nothing_skipped"]()
    assert (retrieve(inputs) != retrieved(inputs)).any()


@only_interpreted
def test_a_race_is_noticed_in_whichever_kernel():
    fetch_into_what_is_moved = retrieve_cases.chosen([1, 2], [5, 6], ([5, 6], [7, 8]))
    with races() as detectors:
        retrieve(fetch_into_what_is_moved)
        retrieve(retrieve_cases.CASES["one"]())
    assert [detector.races_found for detector in detectors] == [True, False]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 1024), "records of shape (1024,) (only whole tiles"),
        ((4, 4, 128), "records of shape (4, 128)"),
        ((2**24, 8, 128), "16777216 records of 1024 words (offsets are 32 bit"),
    ],
)
def test_pools_that_are_refused(shape, reason):
    for size, expected in ((shape, reason), ((2**24 - 1, 8, 128), "None")):
        with jax.ensure_compile_time_eval():
            found = []
            jax.eval_shape(
                lambda pool, found=found: found.append(str(tpu_records.supports(pool))),
                jax.ShapeDtypeStruct(size, jnp.int32),
            )
        assert expected in found[0]
