"""`plan` against the loops of the NumPy model, and against what must hold of any plan."""

from functools import cache, partial

import jax
import numpy as np
import pytest

from pallas_kernels.plan.api import plan
from pallas_kernels.plan.cases import CASES
from tests.hierarchy.numpy_model import Residency, plan_request


@cache
def case(name):
    """Inputs and outputs of a case; every case has its own shapes, so it is compiled once."""
    inputs = CASES[name]()
    call = jax.jit(
        partial(plan, page_slots=inputs.page_slots),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return jax.device_get((inputs, *call(inputs.wanted, inputs.tables)))


def residency(inputs, request):
    held = Residency()
    held.pages = [page for page in inputs.wanted.pages[request].tolist() if page >= 0]
    for position, slot in enumerate(inputs.tables.slot_of[request].tolist()):
        if slot >= 0:
            held.hold(position, slot, inputs.tables.mark[slot])
    return held


def by_loops(inputs, request):
    """The plan of one request, and what it holds afterwards."""
    wanted, held = inputs.wanted, residency(inputs, request)
    tails = dict(zip(wanted.selection[request].flat, wanted.tail_slot[request].flat, strict=True))
    expected = plan_request(
        held,
        page_slots=inputs.page_slots,
        selection=[query[query >= 0].tolist() for query in wanted.selection[request]],
        tail_slot=lambda position: tails[position] if tails[position] >= 0 else None,
        retiring=[position for position in wanted.retiring[request].tolist() if position >= 0],
        staging=wanted.staging[request].tolist(),
        step=int(wanted.step),
    )
    return expected, held


def moves(positions, slots):
    return {p: s for p, s in zip(positions.tolist(), slots.tolist(), strict=True) if p >= 0}


@pytest.mark.parametrize("name", CASES)
def test_equals_loops(name):
    inputs, result, tables = case(name)
    for request, selection in enumerate(inputs.wanted.selection):
        expected, held = by_loops(inputs, request)
        location = [[expected.location.get(p, -1) for p in query] for query in selection.tolist()]
        np.testing.assert_array_equal(result.location[request], location)
        fetched = moves(result.fetch_position[request], result.fetch_slot[request])
        assert fetched == expected.fetch
        retired = moves(result.retire_position[request], result.retire_slot[request])
        assert retired == expected.retire
        counts = [int(column[request]) for column in result.counts]
        found = [len(expected.location), expected.hits, expected.tails, len(expected.fetch)]
        assert counts == [*found, expected.staged]
        resident = np.flatnonzero(tables.slot_of[request] >= 0)
        assert moves(resident, tables.slot_of[request][resident]) == held.slot_of
        for position, slot in held.slot_of.items():
            assert tables.position[slot] == position
            assert tables.mark[slot] == held.mark[slot]


@pytest.mark.parametrize("name", CASES)
def test_nothing_selected_is_dropped(name):
    """The selected set is exactly what attention reads, and what it reads is not overwritten."""
    inputs, result, _ = case(name)
    np.testing.assert_array_equal(result.location >= 0, inputs.wanted.selection >= 0)
    for request, selection in enumerate(inputs.wanted.selection):
        chosen = selection >= 0
        places = set(zip(selection[chosen], result.location[request][chosen], strict=True))
        # One slot per position, one position per slot.
        assert len(places) == len({p for p, _ in places}) == len({s for _, s in places})
        retired = result.retire_slot[request]
        assert not {s for _, s in places} & set(retired[retired >= 0])


@pytest.mark.parametrize("name", CASES)
def test_fetches_each_missing_record_once(name):
    inputs, result, _ = case(name)
    for request, selection in enumerate(inputs.wanted.selection):
        fetched = result.fetch_position[request]
        fetched = fetched[fetched >= 0].tolist()
        assert len(fetched) == len(set(fetched)) <= inputs.wanted.selection[request].size
        here = inputs.tables.slot_of[request][selection] >= 0
        missing = selection[~here & (inputs.wanted.tail_slot[request] < 0) & (selection >= 0)]
        assert set(fetched) == set(missing.tolist())


@pytest.mark.parametrize("name", CASES)
def test_tables_stay_inverse(name):
    _, _, tables = case(name)
    request, position = np.nonzero(tables.slot_of >= 0)
    slot = tables.slot_of[request, position]
    assert len(set(slot.tolist())) == len(slot)
    np.testing.assert_array_equal(tables.position[slot], position)
    assert (tables.position >= 0).sum() == len(slot)


def test_cases_reach_every_branch():
    """What the names of the cases promise does happen in them."""
    count = {name: case(name)[1].counts for name in CASES}
    assert count["all_hits"].fetched.sum() == 0 < count["all_hits"].hit.sum()
    assert count["all_misses"].hit.sum() == 0 < count["all_misses"].fetched.sum()
    assert count["overflow"].staged.sum() > 0 < count["overflow_with_hits"].staged.sum()
    assert count["overflow_with_hits"].hit.sum() > 0
    assert count["all_in_tail"].tail.sum() == count["all_in_tail"].selected.sum() > 0
    assert count["nobody"].selected.sum() == 0
    retired = case("all_hits")[1].retire_position
    crowded = case("overflow")[1].retire_position[count["overflow"].staged > 0]
    assert (retired >= 0).any() and not (crowded >= 0).any()
