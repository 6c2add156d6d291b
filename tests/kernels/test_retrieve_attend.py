"""`retrieve_attend`: its results on a CPU, and what its kernel is given and becomes for a GPU.

The kernel has stages in PTX, so it cannot be interpreted: tests/gpu runs it on the same cases. What
it relies on is tested here: that every block of a selection brings just what its own rows need.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.common.ids import INT32_MAX
from pallas_kernels.common.scaled_rows import GLM_FP8
from pallas_kernels.retrieve.types import Fetches, Moves
from pallas_kernels.retrieve_attend import api, cases, mosaic
from pallas_kernels.sparse_attention.mosaic_rows import BLOCK
from pallas_kernels.sparse_attention.mosaic_work import default_tuning
from tests.support.attention import assert_close, run
from tests.support.lowering import lowered
from tests.support.retrieve_attend import arguments, assert_same, refusal, run_fused

REFUSED = {
    "float32": "queries of float32 .only bfloat16.",
    "glm_two_queries": "2 queries per request .only 1",
}
SUPPORTED = sorted(cases.CASES.keys() - REFUSED.keys())
POISONED = "row_out_of_range"

case = cache(lambda name: cases.CASES[name]())


@pytest.mark.parametrize("name", cases.CASES)
def test_equals_one_operation_after_the_other(name):
    inputs = case(name)
    assert_same(run_fused(inputs), (*run(inputs.after), inputs.after.slots))


@pytest.mark.parametrize("name", sorted(cases.CASES.keys() - {POISONED}))
def test_equals_float64(name):
    inputs = case(name)
    assert_close(inputs.after, run_fused(inputs)[:2])


def test_what_does_not_exist_is_nan_for_its_request_only():
    inputs = case(POISONED)
    values, lse, _ = run_fused(inputs)
    assert np.isnan(values[0].astype(np.float32)).all()
    assert np.isnan(lse[0]).all()
    assert np.isfinite(values[1].astype(np.float32)).all()
    assert np.isfinite(lse[1]).all()


def test_nothing_selected_gives_exact_zeros():
    inputs = case("padded_requests")
    values, lse, _ = run_fused(inputs)
    assert (values[1:] == 0.0).all()
    assert (values[0] != 0.0).any()
    assert np.isneginf(lse[1:]).all()


@pytest.mark.parametrize("name", cases.CASES)
def test_cases_keep_to_what_the_operation_asks_for(name):
    _, slots, fetches, missing, selection, moves, after = case(name)
    taken = [set(request[request >= 0]) for request in after.location.reshape(len(selection), -1)]
    assert sum(map(len, taken)) == len(set().union(*taken)), "two requests read a slot"
    for request, count in enumerate(fetches.counts.tolist()):
        positions = missing[request, :count]
        assert (np.diff(positions) > 0).all()
        assert np.isin(positions, selection[request]).all()
        for mine in selection[request]:
            some = mine[: (mine >= 0).sum()]
            assert (some >= 0).all()
            assert (np.diff(some) > 0).all()
    written = int(fetches.counts.sum()) + (0 if moves is None else 6)
    out_of_range = 4 if name == "targets_out_of_range" else 0
    assert (slots != after.slots).any(axis=1).sum() == written - out_of_range


def test_cases_miss_what_their_names_say():
    counts = {name: case(name).fetches.counts.tolist() for name in cases.CASES}
    assert counts["nothing_missing"] == [0, 0]
    assert counts["everything_missing"] == [150, 70]
    assert counts["only_in_the_last_block"] == [22, 0]
    assert counts["an_empty_selection"][1] == 0 < counts["an_empty_selection"][2]
    assert 0 < sum(counts["few_of_long_lists"]) < 12
    assert case("few_of_long_lists").missing.shape == (2, 600)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_block_brings_what_its_rows_need(name):
    """Each alone: the parts of a selection run at the same time, and share nothing."""
    inputs = case(name)
    operands = *arguments(inputs)[:3], inputs.missing, inputs.selection[:, 0]
    host, rows, targets, before = jax.tree.map(np.asarray, jax.jit(mosaic._brought)(*operands))
    slots = inputs.slots.copy()
    if inputs.moves is not None:
        from_, to = (np.asarray(ids[:6]) for ids in inputs.moves)
        slots[to] = slots[from_]
    every = slots.copy()
    blocks = -(-inputs.selection.shape[2] // BLOCK)
    assert before.shape == (len(inputs.selection), blocks + 1)
    assert (before[:, 0] == 0).all()
    np.testing.assert_array_equal(before[:, -1], inputs.fetches.counts)
    for request, block in np.ndindex(len(before), blocks):
        alone = slots.copy()
        for entry in range(*before[request, block : block + 2]):
            row, target = rows[request, entry], targets[request, entry]
            if target >= 0:
                alone[target] = every[target] = host[row] if row >= 0 else -1
        ids = inputs.after.location[request, 0, block * BLOCK : (block + 1) * BLOCK]
        read = ids[ids >= 0]
        np.testing.assert_array_equal(alone[read], inputs.after.slots[read])
    np.testing.assert_array_equal(every, inputs.after.slots)


def test_fetches_of_blocks_are_counted_as_documented(monkeypatch):
    monkeypatch.setattr(mosaic, "BLOCK", 2)
    count = mosaic._before
    assert count(jnp.array([[5, 9, 12, INT32_MAX]]), jnp.array([[3, 5, 8, 9, 12]])).tolist() == [
        [0, 1, 2, 3]
    ]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([1, BLOCK, 2 * BLOCK + 5]),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_fetches_of_blocks_equal_those_of_a_loop(seed, top_k, share):
    rng = np.random.default_rng(seed)
    selection = np.full((3, top_k), -1, np.int32)
    positions = np.full((3, top_k), INT32_MAX, np.int32)
    wanted = []
    for request in range(3):
        selected = rng.integers(0, top_k + 1)
        mine = np.sort(rng.choice(4 * top_k, selected, replace=False))
        places = np.flatnonzero(rng.random(selected) < share)
        selection[request, :selected] = mine
        positions[request, : len(places)] = mine[places]
        starts = [*range(0, top_k, BLOCK), top_k]
        wanted.append([sum(place < start for place in places) for start in starts])
    assert mosaic._before(jnp.asarray(positions), jnp.asarray(selection)).tolist() == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_case_says_why(name):
    with pytest.raises(NotImplementedError, match=f"retrieve_attend cannot run.*{REFUSED[name]}"):
        run_fused(case(name), backend="mosaic")


def test_more_heads_than_a_cuda_block_holds_are_refused():
    inputs = cases.random(heads=65, top_k=64, selected=(64,))
    assert_close(inputs.after, run_fused(inputs)[:2])
    with pytest.raises(NotImplementedError, match=r"65 heads \(at most 64"):
        run_fused(inputs, backend="mosaic")


def test_every_other_case_is_supported():
    assert [name for name in cases.CASES if refusal(case(name)) is None] == [
        name for name in cases.CASES if name in SUPPORTED
    ]


def test_pools_that_do_not_fit_are_refused():
    inputs = case("glm_small")
    with pytest.raises(ValueError, match=r"records of 319 words .* into slots of 320"):
        run_fused(inputs._replace(host=inputs.host[:, 1:]))


LOWERED = {
    "one_layer": (128, 288, jnp.bfloat16, 0, 0),
    "group": (128, 1152, jnp.bfloat16, 576, 0),
    "fp8_group": (128, 672, GLM_FP8, 328, 128),
    "few_requests": (16, 1152, jnp.bfloat16, 864, 16),
}


@pytest.mark.parametrize("name", LOWERED)
def test_the_kernel_lowers_at_production_size_without_a_copy_of_the_pools(name):
    requests, words, row_format, offset, moves = LOWERED[name]
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    lists = ids(requests, 2048), ids(requests, 2048), ids(requests)
    query = jax.ShapeDtypeStruct((requests, 1, 64, 576), jnp.bfloat16)
    each = ids(requests, 1, 2048)
    host, slots = 100_000 * requests, 8192 * requests
    how = {"offset": offset, "row_format": row_format, "value_width": 512, "scale": 0.06}
    hlo = lowered(
        partial(mosaic.retrieve_attend, **how),
        *(ids(host, words), ids(slots, words)),
        Fetches(*lists),
        api.Attention(query, each, each, lists[0]),
        Moves(ids(moves), ids(moves)) if moves else None,
    )
    calls, others = [], []
    for line in hlo.splitlines():
        (calls if "stablehlo.custom_call" in line else others).append(line)
    kernels = ["__gpu$xla.gpu.triton", "mosaic_gpu_v2"] if moves else ["mosaic_gpu_v2"]
    assert [line.split("@")[1].split("(")[0].strip('"') for line in calls] == kernels
    assert all("output_operand_alias<" in call for call in calls), "slots are not written in place"
    alias = "output_operand_alias<output_tuple_indices = [2], operand_index = 1,"
    assert alias in calls[-1]
    pools = [f"tensor<{count}x{words}xi32>" for count in (host, slots)]
    touched = [line for line in others if any(pool in line for pool in pools)]
    assert [line.split()[0] for line in touched] == ["func.func", "return"], "a pool is copied"
    splits = default_tuning(requests, 2048).splits
    assert splits == (1 if requests == 128 else 8)
    assert f"tensor<{requests}x1x{splits}x64xf32>" in calls[-1]
