"""`dhisparse serve` on a toy model, and what its record makes of events."""

import dataclasses
import json
import os
import signal
from typing import Any

import pytest

from dhisparse_jax.cli import session
from dhisparse_jax.cli.serving import ServingRecord
from dhisparse_jax.engine.events import Acceptance, Finished, NewTokens, StepDone, StepMetrics
from dhisparse_jax.engine.recording import Join, Leave, Step, read_recording
from dhisparse_jax.engine.replay import Arrived
from dhisparse_jax.models.tokenizer import ByteTokenizer
from tests.support.toy_model import toy

CONTEXT = 96


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the registry gives."""

    name: str
    model: Any
    params: Any
    tokenizer: Any
    context: int
    eos: tuple = tuple(range(256))  # none ends a request: it has the length that the trace says
    mesh: None = None


@pytest.fixture
def loaded(monkeypatch):
    model, _ = toy(layers_per_pool=(1, 2), top_k=8, context=CONTEXT)
    model = dataclasses.replace(model, vocabulary=256)
    given = Loaded("toy", model, model.init(0), ByteTokenizer(), CONTEXT)
    monkeypatch.setattr(session, "load_model", lambda *_, **__: given)


def write(folder, *lines):
    path = folder / "t.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def line(arrival, prompt, output, seed=0):
    return {"arrival": arrival, "prompt_tokens": prompt, "output_tokens": output, "seed": seed}


def serve(run, path, *options):
    """The toy by its own name: the bundled model's would bring the bundled draft."""
    return run("serve", "--model", "toy", "--trace", path, *options)


def test_serves_a_trace(run, loaded, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"def f():")
    named = {"arrival": 0, "prompt_file": "p.txt", "output_tokens": 9}
    path, output = write(tmp_path, line(0, 20, 12), line(500, 30, 8, 4), named), tmp_path / "o.json"
    result = serve(run, path, "--json", output, "--interval", 0, "--batch", 2)
    assert result.code == 0
    assert "finished" in result.out.decode()
    assert "resident 100.0%" in result.err
    document = json.loads(output.read_text())
    summary = document["summary"]
    assert (summary["requests"], summary["finished"], summary["output_tokens"]) == (3, 3, 29)
    assert [item["tokens"] for item in document["requests"]] == [12, 9, 8]
    assert summary["seconds"] > 500
    assert 0 < summary["tpot_p50_ms"] <= summary["tpot_p95_ms"]
    times = [sample["seconds"] for sample in document["series"]]
    assert times == sorted(times)
    assert {sample["running"] for sample in document["series"]} == {0, 1, 2}
    assert document["tpot_bound_ms"] is None


def test_records_what_it_selects(run, loaded, tmp_path):
    """Every request comes and goes, and its steps give its tokens: prefill gives the first."""
    path, output = write(tmp_path, *(line(0, 20, 9, seed) for seed in range(3))), tmp_path / "o.sel"
    result = serve(run, path, "--record-selections", output, "--batch", 2)
    assert result.code == 0
    events = read_recording(output).events
    assert sum(isinstance(event, Join) for event in events) == 3
    assert sum(isinstance(event, Leave) for event in events) == 3
    steps = [event for event in events if isinstance(event, Step)]
    assert {len(step.rows) for step in steps} == {1, 2}
    assert all((step.selection[:, step.accepted > 0] >= 0).any() for step in steps)
    assert sum(int(step.accepted.sum()) for step in steps) == 3 * 8


ONE_BY_ONE = ("--batch", 2, "--tpot-ms", 1e-6)
"""Nothing holds a nanosecond: one at a time."""


def test_bound_limits_how_many_run(run, loaded, tmp_path):
    path, output = write(tmp_path, *(line(0, 10, 9) for _ in range(3))), tmp_path / "o.json"
    assert serve(run, path, "--json", output, *ONE_BY_ONE).code == 0
    document = json.loads(output.read_text())
    assert document["summary"]["finished"] == 3
    assert document["tpot_bound_ms"] == 1e-6
    first = [item["first"] for item in document["requests"]]
    last = [item["last"] for item in document["requests"]]
    assert all(end <= begin for end, begin in zip(last[:-1], first[1:], strict=True))


def test_host_memory_limits_how_many_run(run, loaded, tmp_path):
    """3 pages of 16 tokens: two for each request, so the second waits for the first."""
    path, output = write(tmp_path, *(line(0, 20, 9, seed) for seed in (1, 7))), tmp_path / "o.json"
    few = ("--host-memory", 3 * 16 * 512 / 1e9)
    assert serve(run, path, "--json", output, "--interval", 0, *few).code == 0
    document = json.loads(output.read_text())
    assert {sample["running"] for sample in document["series"]} == {0, 1}
    assert [item["tokens"] for item in document["requests"]] == [9, 9]
    error = serve(run, path, "--host-memory", 1e-5).error
    assert error == (
        "--host-memory 1e-05 GB holds 16 tokens; the longest request has 29: give at least "
        "1.7e-05, or shorten it"
    )
    assert "is not a number above 0" in serve(run, path, "--host-memory", 0).error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_what_was_measured(run, loaded, tmp_path, monkeypatch, number):
    """The signal comes in the middle of the second request."""
    path, output = write(tmp_path, *(line(0, 10, 9) for _ in range(3))), tmp_path / "o.json"
    add, heard = ServingRecord.add, []

    def interrupted(self, event):
        add(self, event)
        heard.append(event)
        if isinstance(event, NewTokens) and event.request == 1 and self.requests[1].tokens == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ServingRecord, "add", interrupted)
    result = serve(run, path, "--json", output, "--interval", 1000, *ONE_BY_ONE)
    assert result.code == 130
    assert "stopping after this step" in result.err
    document = json.loads(output.read_text())
    assert [item["tokens"] for item in document["requests"]] == [9, 4, 0]
    assert [item["finish_reason"] for item in document["requests"]] == ["length", None, None]
    assert document["summary"]["output_tokens"] == 13
    (sample,) = document["series"]
    assert sample["tokens_per_s"] > 0
    assert "13" in result.out.decode()
    assert not list(tmp_path.glob(".o.json*"))


def test_requests_that_never_fit_are_refused(run, loaded, tmp_path):
    path = write(tmp_path, line(0, 10, 6), line(0, 90, 7))
    error = serve(run, path).error
    assert error == (
        f"{path}:2: 90 prompt and 7 output tokens can never fit: toy has a context of 96; "
        "shorten them"
    )


@pytest.mark.parametrize("bound", [0, -1, "nan", "inf"])
def test_bounds_without_a_meaning(run, tmp_path, bound):
    error = serve(run, write(tmp_path, line(0, 1, 1)), "--tpot-ms", bound).error
    assert "is not a number above 0" in error


def test_record_of_known_times():
    """A token after 1 s, three more at 1.6 s, one at 2 s; a sample at the end."""
    now = [0.0]
    record = ServingRecord(lambda: now[0], lambda: (1, 2, 0.5), interval=2.0)
    metrics = StepMetrics(10, 6, 2, 2, 4 * 10**9)

    def at(seconds, *events):
        now[0] = seconds
        for event in events:
            record.add(event)

    at(0.5, Arrived(7, 0.25))
    at(1.0, NewTokens(7, (1,)))
    at(1.6, StepDone(1, metrics, Acceptance(1, (1,), (1,))), NewTokens(7, (1, 2, 3)))
    at(2.0, NewTokens(7, (4,)), Finished(7, "length"))
    (sample,) = record.samples
    assert (sample.seconds, sample.running, sample.waiting) == (2.0, 1, 2)
    assert sample.tokens_per_s == 5 / 2
    assert sample.tpot_p50_ms == pytest.approx(200.0)
    assert sample.tpot_p95_ms == pytest.approx(370.0)
    assert (sample.resident_share, sample.fetched_share) == (0.5, 0.2)
    assert sample.link_gb_per_s == 2.0
    assert sample.accept_length == 2.0
    summary = record.summary()
    assert summary["tpot_p50_ms"] == pytest.approx(250.0)
    assert summary["ttft_p50_ms"] == 750.0
    assert (summary["finished"], summary["output_tokens"], summary["steps"]) == (1, 5, 1)
    record.sample()
    assert record.samples[1].tokens_per_s == 0
    assert record.samples[1].fetched_share == 0
