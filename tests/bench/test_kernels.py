"""The benchmark commands on small sizes: their results, their reasons, their checks."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import typer

from bench import kernels, link
from bench.ops import backup, plan, retrieve, retrieve_attend, sparse_attention
from bench.ops.copies import missed_copies, random_copies, random_selections
from dhisparse_jax.engine.rates import Floors
from pallas_kernels.retrieve import api as retrieve_api
from pallas_kernels.retrieve_attend import api as retrieve_attend_api
from pallas_kernels.sparse_attention.api import sparse_attention as attend
from pallas_kernels.top_k import api as top_k_api
from pallas_kernels.top_k.reference import top_k as top_k_reference

FLOORS = Floors(hbm_gbps=1, h2d_gbps=1, bf16_tflops=1, launch_us=1)
COLUMNS = {"op", "case", "time_us", "floor_us", "ratio", "bound", "detail"}


@pytest.fixture(autouse=True)
def _known_floors(monkeypatch):
    """Floors take seconds to measure; `test_timing` measures them."""
    monkeypatch.setattr(kernels, "measure_floors", lambda *_, **__: FLOORS)


def _last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def _small(operation, name):
    job = next(
        job
        for job in kernels.production(operation, kernels.OPERATIONS[operation].CASES, small=True)
        if job.case == name
    )
    return kernels.run(job, FLOORS, runs=2)


@pytest.mark.parametrize(
    ("operation", "case"),
    [
        ("retrieve", "2688B_16MB"),
        ("backup", "2688B_4MB"),
        ("plan", "16_requests_T1"),
        ("index_scores", "T1"),
        ("top_k", ""),
        ("sparse_attention", "T8"),
        ("retrieve_attend", "2688B_traces"),
        ("packed_products", "gate_8_rows"),
        ("draft_attention", "dflash2_1_request"),
    ],
)
def test_small_run_reports_every_case(operation, case, capsys, tmp_path):
    out = tmp_path / "kernels.json"
    kernels.main(op=operation, case=case, small=True, runs=2, json=out)
    result = _last_line(capsys)
    assert json.loads(out.read_text()) == result
    assert result["bench"] == "kernels"
    assert result["small"] is True
    assert {"device", "driver", "jax", "commit", "command"} <= result.keys()
    assert result["floors"].keys() >= {"hbm_gbps", "h2d_gbps"}
    assert result["rows"]
    for row in result["rows"]:
        assert row.keys() == COLUMNS
        assert row["op"] == operation
        assert row["detail"]["backend"] == "reference"
        if row["time_us"] is None:
            assert "NotImplementedError" in row["detail"]["reason"]
        else:
            assert row["bound"] in ("hbm", "link", "flops", "latency")
            assert row["ratio"] == pytest.approx(row["time_us"] / row["floor_us"])


def test_the_bound_is_printed_before_the_time(capsys):
    _small("top_k", "512_of_125000")
    assert "top_k 512_of_125000 (reference): 0.0323 MB in device memory" in capsys.readouterr().err


def test_production_sizes_are_not_run_on_a_cpu(capsys):
    kernels.main(op="plan", runs=2)
    rows = [row for row in _last_line(capsys)["rows"] if not row["case"].startswith("shared_")]
    assert rows
    for row in rows:
        assert row["time_us"] is None
        assert "--small" in row["detail"]["reason"]


def test_a_backend_that_an_operation_lacks_is_not_replaced(monkeypatch, capsys):
    def top_k(scores, k):
        return top_k_reference(scores, k)

    monkeypatch.setattr(top_k_api, "top_k", top_k)
    kernels.main(op="top_k", small=True, backend="triton", runs=2)
    for row in _last_line(capsys)["rows"]:
        assert row["time_us"] is None
        assert row["detail"]["reason"].endswith("top_k has no triton implementation")


def test_unknown_operation_is_refused():
    with pytest.raises(typer.BadParameter, match="is none of retrieve, backup"):
        kernels.main(op="sort")


def test_wrong_records_are_noticed(monkeypatch, capsys):
    monkeypatch.setattr(retrieve_api, "retrieve", lambda host, slots, fetches: slots)
    with pytest.raises(typer.Exit):
        kernels.main(op="retrieve", case="656B_8", small=True, runs=2)
    for row in _last_line(capsys)["rows"]:
        assert row["time_us"] is None
        assert row["detail"]["reason"].startswith("WrongResultError")


def test_copies_are_checked():
    assert _small("retrieve", "656B_64")["detail"]["checked"]
    detail = _small("backup", "4608B_512")["detail"]
    assert detail["checked"]
    assert detail["in_place"]


def test_the_parts_of_an_operation_are_timed_beside_it():
    for kind in ("traces", "random"):
        row = _small("retrieve_attend", f"1152B_{kind}_14.2")
        detail = row["detail"]
        assert detail["checked"]
        assert detail["missed"] == pytest.approx(0.142, rel=0.2)
        longer = max(detail["retrieve_us"], detail["attend_us"])
        assert detail["together_over_longer"] == pytest.approx(row["time_us"] / longer)


@pytest.mark.parametrize("what", ["records", "lse"])
def test_wrong_attention_is_noticed(what, monkeypatch, capsys):
    def early(host, slots, fetches, attention, **how):
        """Attention before retrieval, or no retrieval."""
        attended = attend(attention.query, slots, attention.location, **how)
        return attended, retrieve_api.retrieve(host, slots, fetches) if what == "lse" else slots

    monkeypatch.setattr(retrieve_attend_api, "retrieve_attend", early)
    with pytest.raises(typer.Exit):
        kernels.main(op="retrieve_attend", case="1152B_random_14.2", small=True, runs=2)
    (row,) = _last_line(capsys)["rows"]
    assert row["time_us"] is None
    assert row["detail"]["reason"].startswith(f"WrongResultError: ['{what}'] differs")


def test_random_selections_miss_an_exact_share():
    sizes = retrieve_attend.CASES["4608B_random_1.4"].small().sizes
    positions, missed = random_selections(sizes, k=50, share=0.14)
    assert positions.shape == missed.shape == (2, 2, 50)
    assert (np.diff(positions, axis=2) > 0).all()
    assert positions.max() < sizes.capacity
    assert (missed.sum(axis=2) == 7).all()
    assert (missed[0, 0] != missed[1, 1]).any()


def test_missed_copies_are_the_misses_of_the_trace():
    sizes = retrieve.CASES["2688B_misses_2K"].small().sizes
    copies = missed_copies(sizes, k=64, budget=128)
    for rows, slots, counts in zip(copies.rows, copies.slots, copies.counts, strict=True):
        assert rows.shape == slots.shape == (2, 64)
        counted = np.arange(64) < np.asarray(counts)[:, None]
        np.testing.assert_array_equal(rows >= 0, counted)
        np.testing.assert_array_equal(slots >= 0, counted)
        for number, (mine, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            assert len(np.unique(mine[:count])) == count
            assert (mine[:count] // sizes.capacity == number).all()
        assert len(np.unique(slots[slots >= 0])) == counts.sum()
    assert copies.live == pytest.approx(128 * 0.134, rel=0.3)


def test_few_records_in_long_lists():
    sizes = retrieve.CASES["2688B_512_of_2M"].sizes
    assert (sizes.records, sizes.requests, sizes.entries) == (512, 128, 16384)
    sizes = dataclasses.replace(sizes.scaled(), requests=4)
    copies = random_copies(sizes)
    assert copies.rows[0].shape == (4, 64)
    assert copies.counts[0].tolist() == [16] * 4
    assert copies.live == int((copies.rows[0] >= 0).sum()) == 64


def test_plans_start_anew_in_every_chain():
    rows = [_small("plan", f"16_requests_T{queries}") for queries in (1, 8)]
    for row, misses in zip(rows, (0.134, 0.514), strict=True):
        assert row["detail"]["fetched_k"] == pytest.approx(misses, rel=0.2)
        assert row["detail"]["staged_k"] == 0


def test_overlap_of_neighbouring_queries():
    case = sparse_attention.CASES["128_requests_T8"].small()
    (_, _, locations), distinct = case.build("reference").operands, case.distinct
    for location in np.asarray(locations[0]):
        assert len(np.unique(location)) == distinct
        for before, after in itertools.pairwise(location):
            assert len(np.unique(after)) == case.k
            assert np.isin(after, before).sum() == round(0.3 * case.k)


def test_production_pools_span_24_gb():
    for cases in (retrieve.CASES, backup.CASES, retrieve_attend.CASES):
        for name, case in cases.items():
            reached = case.sizes.reached if cases is backup.CASES else case.sizes.span
            assert reached >= 24e9, name
            assert case.sizes.pool_records < 2**31
    one_pool = retrieve.CASES["2688B_16MB_one_pool"].sizes
    assert one_pool.pool_records * one_pool.words > 2**31


def test_plan_lists_have_room_for_the_whole_history():
    case = plan.CASES["16_requests_T8"].small()
    work = case.build("reference")
    pages = work.operands[0].pages
    assert pages.shape == (2, -(-case.capacity // 16))
    assert int(jnp.sum(pages >= 0)) * 16 == work.state.position.shape[0]


def test_link_says_what_it_means_on_a_cpu(capsys):
    link.main(case="656B_64_records", small=True, runs=2)
    result = _last_line(capsys)
    assert "no link" in result["meaning"]
    assert [row["op"] for row in result["rows"]] == ["retrieve", "backup"]
    assert all(row["time_us"] > 0 for row in result["rows"])


def test_link_pins_the_pools_of_a_record_size_once():
    sizes = [case.sizes.words for _, sized in link.cases() for case in sized.values()]
    changes = [new for old, new in itertools.pairwise(sizes) if new != old]
    assert [sizes[0], *changes] == sorted(set(sizes))
