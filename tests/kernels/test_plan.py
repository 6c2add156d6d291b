"""`plan` against the loops of the NumPy model, and against what must hold of any plan."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.plan import api, reference, triton
from pallas_kernels.plan.cases import CASES
from pallas_kernels.plan.types import PlanInput, PlanTables, Tail
from tests.hierarchy.numpy_model import Residency, plan_request
from tests.support.lowering import lowered_kernels

SMALL = triton.Tuning(
    look_block=4, look_unroll=2, look_programs=6, survey_programs=6, block=8, slots=16, moves=4
)
"""Several blocks of everything, for the small cases."""

RUN = {"reference": reference.plan, "triton": partial(triton.plan, tuning=SMALL, interpret=True)}
# Cases of one shape share a program.
JITTED = {
    name: jax.jit(
        run,
        static_argnames="page_slots",
        compiler_options={"xla_backend_optimization_level": 0},
    )
    for name, run in RUN.items()
}
GLM = partial(triton.plan, interpret=True)

EVERY = pytest.mark.parametrize(
    ("name", "implementation"), [(name, run) for name in CASES for run in RUN]
)


@cache
def case(name, implementation):
    """Inputs and outputs of a case."""
    inputs = CASES[name]()
    run = JITTED[implementation]
    if name.startswith("glm") and implementation == "triton":
        run = jax.jit(GLM, static_argnames="page_slots")
    outputs = run(inputs.wanted, inputs.tables, page_slots=inputs.page_slots)
    return jax.device_get((inputs, *outputs))


def selected(inputs):
    """Which entries of the selection are positions."""
    selection = inputs.wanted.selection
    return (selection >= 0) & (selection < inputs.tables.slot_of.shape[1])


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
    start, first = (int(column[request]) for column in wanted.tail[:2])
    ring = lambda position: first + position % int(wanted.tail.length)
    expected = plan_request(
        held,
        page_slots=inputs.page_slots,
        selection=[
            query[chosen].tolist()
            for query, chosen in zip(
                wanted.selection[request], selected(inputs)[request], strict=True
            )
        ],
        tail_slot=lambda position: ring(position) if position >= start else None,
        retiring=[position for position in wanted.retiring[request].tolist() if position >= 0],
        staging=wanted.staging[request].tolist(),
        step=int(wanted.step),
    )
    return expected, held


def moves(positions, slots):
    return {p: s for p, s in zip(positions.tolist(), slots.tolist(), strict=True) if p >= 0}


@EVERY
def test_equals_loops(name, implementation):
    inputs, result, tables = case(name, implementation)
    for request, selection in enumerate(inputs.wanted.selection):
        expected, held = by_loops(inputs, request)
        location = [[expected.location.get(p, -1) for p in query] for query in selection.tolist()]
        np.testing.assert_array_equal(result.location[request], location)
        fetched = moves(result.fetch_position[request], result.fetch_slot[request])
        assert fetched == expected.fetch
        retired = moves(result.retire_position[request], result.retire_slot[request])
        assert retired == expected.retire
        fetches, left = len(expected.fetch), [p for p in expected.evicted if p is not None]
        gone = result.fetch_evicted[request]
        assert [p for p in gone[:fetches].tolist() if p >= 0] == left
        assert (gone[len(expected.evicted) :] == -1).all()
        left = [p for p in expected.retire_evicted if p is not None]
        assert [p for p in result.retire_evicted[request].tolist() if p >= 0] == left
        assert result.held[request] == len(held.slot_of)
        counts = [int(column[request]) for column in result.counts]
        found = [len(expected.location), expected.hits, expected.tails, len(expected.fetch)]
        assert counts == [*found, expected.staged]
        resident = np.flatnonzero(tables.slot_of[request] >= 0)
        assert moves(resident, tables.slot_of[request][resident]) == held.slot_of
        for position, slot in held.slot_of.items():
            assert tables.position[slot] == position
            assert tables.mark[slot] == held.mark[slot]


@EVERY
def test_nothing_selected_is_dropped(name, implementation):
    """The selected set is exactly what attention reads, and what it reads is not overwritten."""
    inputs, result, _ = case(name, implementation)
    np.testing.assert_array_equal(result.location >= 0, selected(inputs))
    for request, selection in enumerate(inputs.wanted.selection):
        chosen = selected(inputs)[request]
        places = set(zip(selection[chosen], result.location[request][chosen], strict=True))
        # One slot per position, one position per slot.
        assert len(places) == len({p for p, _ in places}) == len({s for _, s in places})
        retired = result.retire_slot[request]
        assert not {s for _, s in places} & set(retired[retired >= 0])


@EVERY
def test_fetches_each_missing_record_once(name, implementation):
    inputs, result, _ = case(name, implementation)
    for request, selection in enumerate(inputs.wanted.selection):
        fetched, count = result.fetch_position[request], result.counts.fetched[request]
        assert (fetched[:count] >= 0).all() and (fetched[count:] == -1).all()
        assert (result.fetch_slot[request] >= 0).tolist() == (fetched >= 0).tolist()
        fetched = fetched[:count].tolist()
        assert len(fetched) == len(set(fetched)) <= inputs.wanted.selection[request].size
        chosen = selected(inputs)[request]
        here = inputs.tables.slot_of[request][np.where(chosen, selection, 0)] >= 0
        missing = selection[~here & (selection < inputs.wanted.tail.start[request]) & chosen]
        assert set(fetched) == set(missing.tolist())


@EVERY
def test_tables_stay_inverse(name, implementation):
    _, _, tables = case(name, implementation)
    request, position = np.nonzero(tables.slot_of >= 0)
    slot = tables.slot_of[request, position]
    assert len(set(slot.tolist())) == len(slot)
    np.testing.assert_array_equal(tables.position[slot], position)
    assert (tables.position >= 0).sum() == len(slot)


def test_cases_reach_every_branch():
    """What the names of the cases promise does happen in them."""
    count = {name: case(name, "reference")[1].counts for name in CASES}
    assert count["all_hits"].fetched.sum() == 0 < count["all_hits"].hit.sum()
    assert count["all_misses"].hit.sum() == 0 < count["all_misses"].fetched.sum()
    assert count["overflow"].staged.sum() > 0 < count["overflow_with_hits"].staged.sum()
    assert count["overflow_with_hits"].hit.sum() > 0
    assert count["all_in_tail"].tail.sum() == count["all_in_tail"].selected.sum() > 0
    assert count["nobody"].selected.sum() == 0
    assert count["lengths_0_and_1"].selected.tolist()[:2] == [0, 3]
    outside = CASES["outside"]()
    assert 0 < selected(outside).sum() < (outside.wanted.selection >= 0).sum()
    retired = case("all_hits", "reference")[1].retire_position
    crowded = case("overflow", "reference")[1].retire_position[count["overflow"].staged > 0]
    assert (retired >= 0).any() and not (crowded >= 0).any()


@pytest.mark.parametrize("name", CASES)
def test_implementations_agree_in_every_entry(name):
    expected, found = (case(name, implementation)[1:] for implementation in RUN)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("implementation", RUN)
def test_positions_outside_the_tables_are_as_no_slot(implementation):
    wanted, tables, page_slots = CASES["verify"]()
    capacity = tables.slot_of.shape[1]

    def planned(*outside):
        ids = jnp.array(outside, jnp.int32)
        selection = wanted.selection.at[:, 1, : len(outside)].set(ids)
        retiring = wanted.retiring.at[:, : len(outside)].set(ids)
        given = wanted._replace(selection=selection, retiring=retiring)
        return JITTED[implementation](given, tables, page_slots=page_slots)

    result, after = planned(capacity, -7, 2**31 - 1)
    jax.tree.map(np.testing.assert_array_equal, (result, after), planned(-1, -1, -1))
    assert (result.location[:, 1, :3] == -1).all() and (result.retire_position == -1).all()
    assert (result.location[:, 0] >= 0).any() and result.counts.fetched.sum() > 0


REQUESTS, QUERIES, K, CAPACITY, PAGES, PAGE_SLOTS, TAIL = 2, 2, 6, 64, 4, 4, 4

SELECTIONS = {
    "scattered": lambda rng, step, query, seen: rng.permutation(seen),
    "all_new": lambda rng, step, query, seen: (np.arange(K) + (2 * step + query) * K) % seen,
    "the_same": lambda rng, step, query, seen: np.arange(0, seen, 4),
    "newest": lambda rng, step, query, seen: np.arange(seen)[::-1],
    "one_position": lambda rng, step, query, seen: np.full(K, seen // 2),
    "nothing": lambda rng, step, query, seen: np.arange(0),
}


def wanted_at(step, style, pages, rng):
    """What a step wants of requests that grow by one position per step."""
    selection = np.full((REQUESTS, QUERIES, K), -1, np.int32)
    lengths = np.array([20, 3]) + step
    for request, query in np.ndindex(REQUESTS, QUERIES):
        picked = SELECTIONS[style](rng, step, query, lengths[request] + query + 1)[:K]
        selection[request, query, : len(picked)] = picked
    oldest = np.maximum(lengths + QUERIES - TAIL, 0)
    first = REQUESTS * PAGES * PAGE_SLOTS + TAIL * np.arange(REQUESTS)
    retiring = (lengths + QUERIES - TAIL)[:, None] + np.arange(QUERIES)
    staging = first.max() + TAIL + np.arange(REQUESTS * QUERIES * K)
    return PlanInput(
        selection=jnp.asarray(selection),
        tail=Tail(*(jnp.asarray(each, jnp.int32) for each in (oldest, first, TAIL))),
        retiring=jnp.asarray(np.where(retiring >= 0, retiring, -1), jnp.int32),
        staging=jnp.asarray(staging.reshape(REQUESTS, -1), jnp.int32),
        pages=pages,
        step=jnp.int32(step + 1),
    )


def test_implementations_stay_in_lockstep():
    """Many steps from empty tables, with budgets that cannot hold what two queries select."""
    rng = np.random.default_rng(0)
    table = rng.permutation(REQUESTS * PAGES).reshape(REQUESTS, PAGES)
    table[:, 2:] = -1
    pages = jnp.asarray(table, jnp.int32)
    slots = REQUESTS * PAGES * PAGE_SLOTS
    empty = lambda *shape: jnp.full(shape, -1, jnp.int32)
    states = dict.fromkeys(
        RUN, PlanTables(empty(REQUESTS, CAPACITY), empty(slots), jnp.zeros(slots, jnp.int32))
    )
    staged = hits = 0
    for step in range(4 * len(SELECTIONS)):
        wanted = wanted_at(step, list(SELECTIONS)[step % len(SELECTIONS)], pages, rng)
        results = {}
        for name, run in JITTED.items():
            results[name], states[name] = run(wanted, states[name], page_slots=PAGE_SLOTS)
        for compared in (results, states):
            jax.tree.map(np.testing.assert_array_equal, *compared.values())
        staged += int(results["triton"].counts.staged.sum())
        hits += int(results["triton"].counts.hit.sum())
    assert staged > 0 and hits > 0


@pytest.mark.parametrize(("requests", "queries", "budget"), [(16, 1, 2), (16, 8, 4), (128, 8, 4)])
def test_lowers_for_cuda(requests, queries, budget):
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
    k, capacity, slots = 2048, 100_064, requests * budget * 2048
    staging = max(0, queries - budget) * k
    wanted = PlanInput(
        selection=ids(requests, queries, k),
        tail=Tail(start=ids(requests), first=ids(requests), length=ids()),
        retiring=ids(requests, queries),
        staging=ids(requests, staging),
        pages=ids(requests, capacity // 16),
        step=ids(),
    )
    tables = PlanTables(ids(requests, capacity), ids(slots), ids(slots))
    kernels = lowered_kernels(partial(triton.plan, page_slots=16), wanted, tables)
    assert kernels == 3


def test_what_is_not_supported_is_refused_with_a_reason():
    reason = triton.supports(2**16, 2**15)
    assert reason == "a table of 65536 x 32768 positions is not indexed by 32 bits"
    assert triton.supports(128, 1_000_000) is None
    assert default_backend("plan", "gpu") == "triton"
    inputs = CASES["any"]()
    with pytest.raises(ValueError, match="interpret"):
        api.plan(inputs.wanted, inputs.tables, page_slots=inputs.page_slots, backend="triton")
