"""`retrieve` and `backup`: exact copies between host records and device slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from dhisparse_jax.hierarchy.state import HOST_KIND
from pallas_kernels.backup import api as backup_api
from pallas_kernels.backup import cases as backup_cases
from pallas_kernels.backup import launch
from pallas_kernels.backup import reference as backup_reference
from pallas_kernels.backup import triton as backup_triton
from pallas_kernels.common.rows import unpack
from pallas_kernels.common.triton_rows import Tuning, default_tuning, pieces
from pallas_kernels.retrieve import api as retrieve_api
from pallas_kernels.retrieve import cases as retrieve_cases
from pallas_kernels.retrieve import reference as retrieve_reference
from pallas_kernels.retrieve import triton as retrieve_triton
from tests.support.copies import backed_up, retrieved
from tests.support.lowering import lowered, lowered_kernels
from tests.support.memory import on_host

FEW = Tuning(records=4, warps=1, programs=3)
"""So that the programs of a small case have several turns, and the last one is not full."""

QUICK = {"xla_backend_optimization_level": 0}

RETRIEVE = {
    "reference": retrieve_reference.retrieve,
    "triton": partial(retrieve_triton.retrieve, interpret=True),
    "triton_few": partial(retrieve_triton.retrieve, tuning=FEW, interpret=True),
}
BACKUP = {
    "reference": backup_reference.backup,
    "triton": partial(backup_triton.backup, interpret=True),
    "triton_few": partial(backup_triton.backup, tuning=FEW, interpret=True),
    "triton_pool_by_pool": partial(backup_triton.backup, interpret=True),
}


def run_backup(call, inputs, hosts):
    """`call` under `jit`, with the pools donated and slot arrays shared as the case says."""

    def run(hosts, slots, rows, sources):
        return call(hosts, [slots[array] for array in inputs.slots_of], rows, sources)

    return jax.jit(run, donate_argnums=0, compiler_options=QUICK)(
        hosts, inputs.slots, inputs.rows, inputs.sources
    )


@pytest.mark.parametrize("implementation", RETRIEVE)
@pytest.mark.parametrize("name", retrieve_cases.CASES)
def test_retrieve(name, implementation):
    inputs = retrieve_cases.CASES[name]()
    run = jax.jit(RETRIEVE[implementation], compiler_options=QUICK)
    slots = run(on_host(inputs.host), *inputs[1:])
    np.testing.assert_array_equal(slots, retrieved(inputs))


@pytest.mark.parametrize("implementation", BACKUP)
@pytest.mark.parametrize("name", backup_cases.CASES)
def test_backup(name, implementation, monkeypatch):
    monkeypatch.setattr(launch, "SEVERAL_RESULTS", implementation != "triton_pool_by_pool")
    inputs = backup_cases.CASES[name]()
    hosts = run_backup(BACKUP[implementation], inputs, [on_host(host) for host in inputs.hosts])
    for host, wanted in zip(hosts, backed_up(inputs), strict=True):
        assert host.sharding.memory_kind == HOST_KIND
        np.testing.assert_array_equal(host, wanted)


def test_cases_skip_what_their_names_say():
    inputs = retrieve_cases.CASES["everything_skipped"]()
    np.testing.assert_array_equal(retrieved(inputs), inputs.slots)
    inputs = backup_cases.CASES["everything_skipped"]()
    for host, wanted in zip(inputs.hosts, backed_up(inputs), strict=True):
        np.testing.assert_array_equal(wanted, host)
    inputs = backup_cases.CASES["every_row"]()
    for host, wanted in zip(inputs.hosts, backed_up(inputs), strict=True):
        assert (host != wanted).any(axis=1).all()


@pytest.mark.parametrize("name", ["glm_small", "every_slot", "everything_skipped", "no_entries"])
def test_retrieve_works_in_place(name):
    inputs = retrieve_cases.CASES[name]()
    host = on_host(inputs.host)
    slots = jnp.array(inputs.slots)
    where = slots.unsafe_buffer_pointer()
    result = jax.jit(retrieve_api.retrieve, donate_argnums=1)(host, slots, *inputs[2:])
    assert slots.is_deleted()
    assert result.unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(host, inputs.host)


@pytest.mark.parametrize("name", ["glm_small", "every_row", "everything_skipped", "no_entries"])
def test_backup_works_in_place_and_stays_on_the_host(name):
    inputs = backup_cases.CASES[name]()
    hosts = [on_host(host) for host in inputs.hosts]
    assert all(host.sharding.memory_kind == HOST_KIND for host in hosts)
    where = [host.unsafe_buffer_pointer() for host in hosts]
    results = run_backup(backup_api.backup, inputs, hosts)
    assert all(host.is_deleted() for host in hosts)
    assert [result.unsafe_buffer_pointer() for result in results] == where
    assert all(result.sharding.memory_kind == HOST_KIND for result in results)


def test_backup_into_device_memory_stays_there():
    inputs = backup_cases.CASES["nothing_skipped"]()
    hosts = run_backup(backup_api.backup, inputs, [jnp.array(host) for host in inputs.hosts])
    assert all(host.sharding.memory_kind != HOST_KIND for host in hosts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_what_does_not_exist_is_nan_in_every_format(dtype):
    inputs = retrieve_cases.CASES["rows_out_of_range"]()
    slots = jax.jit(retrieve_reference.retrieve)(*inputs)
    assert np.isnan(np.asarray(unpack(slots[1:5], dtype), np.float32)).all()


def test_shapes_that_do_not_fit_are_refused():
    host, slots, fetches, _ = jax.tree.map(jnp.array, retrieve_cases.CASES["one"]())
    with pytest.raises(ValueError, match="records of 32 words cannot be fetched into slots of 31;"):
        retrieve_api.retrieve(host, slots[:, 1:], fetches)
    hosts, slots, rows, sources, _ = jax.tree.map(jnp.array, backup_cases.CASES["one_pool"]())
    with pytest.raises(
        ValueError, match=r"words cannot be written from slots of \[31\] and 1 list"
    ):
        backup_api.backup(hosts, [slots[0][:, 1:]], rows, sources)
    with pytest.raises(ValueError, match="and 2 lists of sources; there must be one of each"):
        backup_api.backup(hosts, slots, rows, jnp.repeat(sources, 2, axis=0))


@pytest.mark.parametrize("words", [1, 21, 164, 192, 288, 672, 1152])
def test_pieces_cover_a_record_and_idle_no_lane(words):
    cut = pieces(words)
    covered = [word for start, width in cut for word in range(start, start + width)]
    assert covered == list(range(words))
    tuning = default_tuning(words)
    assert tuning.records & (tuning.records - 1) == 0
    if words % 32 == 0:
        assert words * tuning.records <= 32 * 32 * tuning.warps


def production(words):
    """Shapes of a GLM-5.3 step: 16 requests, 100,000 positions, 8 queries that select 2,048."""
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    fetches = retrieve_api.Fetches(ids(16, 16384), ids(16, 16384), ids(16))
    slots = ids(450_000, words)
    moves = retrieve_api.Moves(ids(128), ids(128))
    pools = 21
    return (
        (ids(1_600_000, words), slots, fetches, moves),
        ([ids(1_600_000, words)] * pools, [slots] * pools, ids(128), ids(pools, 128)),
    )


@pytest.mark.parametrize("words", [164, 192, 288, 672, 1152])
def test_a_step_is_one_kernel_each(words, monkeypatch):
    fetch, back_up = production(words)
    assert lowered_kernels(retrieve_triton.retrieve, *fetch) == 1
    for several, kernels in ((True, 1), (False, 21)):
        monkeypatch.setattr(launch, "SEVERAL_RESULTS", several)
        # Another function each time, or JAX remembers the first lowering.
        assert lowered_kernels(partial(backup_triton.backup), *back_up) == kernels


@pytest.mark.parametrize("several", [True, False])
def test_every_pool_of_a_backup_is_aliased(several, monkeypatch):
    monkeypatch.setattr(launch, "SEVERAL_RESULTS", several)
    hlo = lowered(partial(backup_triton.backup), *production(672)[1])
    assert hlo.count("#stablehlo.output_operand_alias<") == 21
    outputs = [f"output_tuple_indices = [{pool}]" if several else "" for pool in range(21)]
    assert all(f"{output}, operand_index = " in hlo for output in outputs)


@pytest.mark.parametrize("records", [2**20, 2**22])
def test_offsets_are_64_bit_where_a_pool_needs_it(records, monkeypatch, capfd):
    """2**22 records of 672 words are 2**31.4 words. The printed kernel says what it adds."""
    monkeypatch.setattr(launch, "SEVERAL_RESULTS", True)
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, debug=True))
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    hosts, slots = [ids(records, 672)] * 2, ids(64, 672)
    fetches = retrieve_api.Fetches(ids(2, 8), ids(2, 8), ids(2))
    for call, arguments in (
        (retrieve_triton.retrieve, (hosts[0], slots, fetches)),
        (backup_triton.backup, (hosts, [slots] * 2, ids(8), ids(2, 8))),
    ):
        lowered(call, *arguments)
        added = [line for line in capfd.readouterr().out.splitlines() if "tt.addptr" in line]
        wide = [line for line in added if "xi64>" in line]
        pools = 1 if call is retrieve_triton.retrieve else 2
        assert len(wide) == (pools * len(pieces(672)) if records == 2**22 else 0)
        assert len(added) > len(wide)
