"""Which loads are tried, what is timed, and what comes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.concurrency import ADAPTIVE, DRAFTED, FIXED, ladder, measure, summary, table, whole_pages
from tests.support.jobs import assert_baseline
from tests.support.serving import POLICIES, engine, request

ROOT = Path(__file__).parents[2]


def climbed(setting, sustained):
    """The loads that are tried if those up to `sustained` hold."""
    tried, loads = {}, []
    for load in ladder(setting, tried):
        tried[load] = {"holds": load <= sustained}
        loads.append(load)
    return loads


def test_loads_go_up_or_down_until_that_changes():
    assert climbed(DRAFTED, 2.5) == [2.0, 3.0]
    assert climbed(DRAFTED, 9) == [2.0, 3.0, 4.0]
    assert climbed(DRAFTED, 1.0) == [2.0, 1.0]
    assert climbed(ADAPTIVE, 0) == [1.5, 1.0, 0.5]
    assert climbed(ADAPTIVE, 1.5) == [1.5, 2.0]
    assert climbed(FIXED, 1.0) == [1.0]
    assert climbed(FIXED, 0.5) == [1.0, 0.75, 0.5]


def row(setting, load, p95, bound=5.0):
    figures = {"tpot_p50_ms": p95, "tpot_p95_ms": p95, "tokens_per_s": 1.0}
    figures |= {"accept_length": 1.0, "fetched_share": 0.1, "bound_ms": bound}
    return {"setting": setting, "load": load, **figures, "holds": p95 <= bound}


def test_summary_by_hand():
    rows = [row("fixed", 16, 5.0), row("adaptive", 16, 4.0), row("adaptive", 20, 6.0)]
    assert summary(rows)["sustained"] == {"fixed": 16, "adaptive": 16, "adaptive + draft": 0}
    assert not summary(rows)["holds"]
    rows += [row("adaptive + draft", 32, 4.5), row("adaptive + draft", 40, 5.1)]
    found = summary(rows)
    assert found["sustained"]["adaptive + draft"] == 32
    assert (found["bound_ms"], found["ratio"], found["holds"]) == (5.0, 2.0, True)
    assert table(rows).row_count == 5


def test_whole_pages():
    assert [whole_pages(slots) for slots in (128, 100, 16, 9)] == [128, 96, 16, 9]


@pytest.mark.slow
def test_time_per_token_of_a_full_engine():
    """All three decode until the shortest ends; nothing is left behind."""
    served = engine(*POLICIES["adaptive"])
    found = measure(served, [request(20, 25, seed=1), request(9, 40), request(30, 60, seed=2)])
    assert found["steps"] > 10
    assert 0 < found["tpot_p50_ms"] <= found["tpot_p95_ms"]
    per_request = 1e3 / found["tpot_p50_ms"]
    assert found["tokens_per_s"] == pytest.approx(3 * per_request, rel=0.2)
    assert found["accept_length"] == 1.0
    assert_baseline(served)


@pytest.mark.slow
def test_too_short_to_be_timed():
    served = engine(*POLICIES["adaptive"])
    with pytest.raises(AssertionError, match="too few tokens"):
        measure(served, [request(20, 3, seed=1)])
    assert_baseline(served)


@pytest.mark.slow
def test_small_runs_on_a_cpu(tmp_path):
    """Equal memory, a row for each setting, and every key that a result has."""
    path = tmp_path / "c.json"
    command = [sys.executable, "-m", "bench.concurrency", "--small", "--json", str(path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        check=True,
    )
    document = json.loads(path.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == document
    keys = {"bench", "device", "driver", "jax", "commit", "command", "rows", "summary"}
    assert keys <= set(document)
    assert [(row["setting"], row["load"]) for row in document["rows"]] == [
        ("fixed", 2),
        ("adaptive + draft", 4),
        ("adaptive", 3),
    ]
    fixed, drafted, adaptive = document["rows"]
    assert fixed["host_bytes"] == drafted["host_bytes"] == adaptive["host_bytes"]
    assert fixed["hot_bytes"] == drafted["hot_bytes"] >= adaptive["hot_bytes"]
    assert drafted["accept_length"] > 2
    assert document["summary"]["sustained"]["fixed"] == 2
