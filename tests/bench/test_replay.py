"""A recording is whole, and its replay fetches what the run fetched, step by step."""

import dataclasses
import errno
import io
import json
import os
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.replay import as_recorded, replay, with_draft
from bench.simulate import figures
from dhisparse_jax.cli.report import OutputFile
from dhisparse_jax.cli.selections import recorded
from dhisparse_jax.config import Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.recording import packed_bits, read_recording, unpacked_bits
from dhisparse_jax.errors import UserError
from tests.support.serving import CHUNK, config, model, request, run
from tests.support.toy_draft import toy_draft

# More requests than rows, of different lengths: they come and go between steps.
REQUESTS = [
    request(40, 30),
    request(70, 12, seed=1),
    request(5, 20, seed=2),
    request(60, 25, seed=3),
]
HOT_ROWS = {"fixed": 12, "adaptive": 16, "resident": 1}


@cache
def texts():
    served = run(Engine(*model(), config("resident", 1), chunk=CHUNK), REQUESTS)
    return [[*asked.prompt, *served.tokens[n]] for n, asked in enumerate(REQUESTS)]


def engine(policy, length, steps=1):
    draft = {"draft": toy_draft(texts(), length=length)} if length else {}
    sizes = config(policy, HOT_ROWS[policy], queries=length + 1, record_selections=True)
    return Engine(*model(), sizes, chunk=CHUNK, steps=steps, **draft)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def runs(folder):
    """Recorded runs by policy and draft length, and their files."""

    @cache
    def of(policy, length, steps=1):
        path, served = folder / f"{policy}{length}{steps}", engine(policy, length, steps)
        output = OutputFile(path)
        with recorded(served, output):
            result = run(served, REQUESTS)
        return result, path

    return of


CASES = [
    ("fixed", 0, 1),
    pytest.param("adaptive", 3, 4, marks=pytest.mark.slow),
    pytest.param("adaptive", 0, 1, marks=pytest.mark.slow),
    # The same draft by single steps, and with the other policy.
    pytest.param("adaptive", 3, 1, marks=pytest.mark.slow),
    pytest.param("fixed", 3, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("policy", "length", "steps"), CASES)
def test_replay_fetches_what_the_run_fetched(runs, policy, length, steps):
    result, path = runs(policy, length, steps)
    recording = read_recording(path)
    play, cfg = as_recorded(recording), recording.cfg
    record = replay(cfg, play)
    layers = np.array(cfg.geometry.layers_per_pool)[:, None]
    fetched = (record.fetched * layers).sum(axis=(1, 2)).tolist()
    selected = (record.selected * layers).sum(axis=(1, 2)).tolist()
    done = len(result.steps)
    assert fetched[:done] == [step.fetched_rows for step in result.steps]
    assert selected[:done] == [step.selected_rows for step in result.steps]
    assert sum(fetched[:done]) > 0
    assert not any(selected[done:])  # a dispatch goes on after the last request has ended


@pytest.mark.slow
def test_replay_under_another_policy_is_a_run_under_it(runs):
    """The tokens are the same under every policy, so the selections are, too."""
    _, path = runs("adaptive", 0)
    result, _ = runs("fixed", 0)
    cfg = dataclasses.replace(
        read_recording(path).cfg, policy=Policy.FIXED, hot_rows=HOT_ROWS["fixed"]
    )
    row = figures(cfg, replay(cfg, as_recorded(read_recording(path))))
    assert row["fetched_rows"] == result.total.fetched_rows
    assert row["selected_rows"] == result.total.selected_rows


@pytest.mark.slow
def test_another_draft_length_has_the_same_tokens(runs):
    """Without a draft, from a recorded one: exactly the selections of a run without."""
    _, path = runs("adaptive", 3, 4)
    result, plain = runs("fixed", 0)
    recording = read_recording(path)
    play = with_draft(as_recorded(recording), recording.cfg.pools, queries=1, accept=1)
    cfg = read_recording(plain).cfg
    row = figures(cfg, replay(cfg, play))
    tokens = sum(len(each) for each in result.tokens.values())
    assert row["tokens"] == tokens - len(REQUESTS)  # the first of each comes from its prompt
    assert row["selected_rows"] == result.total.selected_rows
    assert row["fetched_rows"] == result.total.fetched_rows


@pytest.mark.slow
def test_more_queries_share_what_they_fetch(runs):
    _, path = runs("fixed", 0)
    recording = read_recording(path)
    plays = {1: as_recorded(recording)}
    plays[4] = with_draft(plays[1], recording.cfg.pools, queries=4, accept=2)
    rows = {}
    for queries, play in plays.items():
        cfg = dataclasses.replace(recording.cfg, queries=queries, hot_rows=40, tail=8)
        rows[queries] = figures(cfg, replay(cfg, play))
    assert rows[1]["tokens"] == rows[4]["tokens"]
    assert rows[4]["steps"] < 0.7 * rows[1]["steps"]
    assert rows[4]["selected_rows"] < 4 * rows[1]["selected_rows"]


def test_bits():
    ids = np.array([[4, -1]], np.int32)
    assert packed_bits(ids, 3).tolist() == [0xA0]
    rng = np.random.default_rng(0)
    for bits in (1, 7, 8, 17, 31):
        ids = rng.integers(-1, 2**bits - 1, (2, 3, 5)).astype(np.int32)
        data = packed_bits(ids, bits)
        assert len(data) == -(-30 * bits // 8)
        np.testing.assert_array_equal(unpacked_bits(data, bits, ids.shape), ids)


def test_a_recording_is_packed(runs):
    """12 bytes an event, 8 a row, and 7 bits a position of up to 96."""
    result, path = runs("fixed", 0)
    head = path.read_bytes().split(b"\n", 1)[0]
    assert json.loads(head)["bits"] == 7
    recording = read_recording(path)
    rows = [len(event.rows) for event in recording.events if hasattr(event, "rows")]
    steps = sum(12 + 8 * n + -(-2 * n * 8 * 7 // 8) for n in rows)
    others = 12 * (len(recording.events) - len(rows) + 1)
    assert path.stat().st_size == len(head) + 1 + steps + others
    assert len(rows) == len(result.steps)


def test_what_is_no_whole_recording_is_refused(runs, tmp_path):
    _, path = runs("fixed", 0)
    data = path.read_bytes()
    for content, message in [
        (data[:-1], "ends in the middle"),
        (data[:-12], "ends in the middle"),
        (b"", "is not a recording"),
        (b"[1, 2]\n", "is not a recording"),
        (data.replace(b'"version": 2', b'"version": 9', 1), "is not a recording"),
        (data[:-12] + b"\x09" + data[-11:], "an event of kind 9"),
    ]:
        bad = tmp_path / "bad"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_recording(bad)
    with pytest.raises(UserError, match="cannot be read"):
        read_recording(tmp_path / "none")


def test_an_interrupted_run_is_recorded_up_to_then(tmp_path):
    served, path = engine("fixed", 0), tmp_path / "recording"
    steps = []

    def stop():
        steps.append(None)
        if len(steps) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), recorded(served, OutputFile(path)):
        run(served, REQUESTS, after_step=stop)
    events = read_recording(path).events
    # The next one may be running when a step is read.
    assert sum(hasattr(event, "rows") for event in events) in (5, 6)


def test_a_recording_that_cannot_be_written_is_not_kept(tmp_path, monkeypatch):
    """The disk fills up in the middle: what was at the path stays."""
    served, path = engine("fixed", 0), tmp_path / "recording"
    path.write_text("before")
    output = OutputFile(path)

    class Full(io.FileIO):
        room = 2000

        def write(self, data):
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with output.open() as file:
        descriptor = os.dup(file.fileno())
    monkeypatch.setattr(output, "open", lambda: io.BufferedWriter(Full(descriptor, "wb"), 64))
    with pytest.raises(OSError, match="No space"), recorded(served, output):
        result = run(served, REQUESTS)
    output.discard()
    assert [[*asked.prompt, *result.tokens[n]] for n, asked in enumerate(REQUESTS)] == texts()
    assert path.read_text() == "before"
    assert [child.name for child in tmp_path.iterdir()] == ["recording"]


@pytest.mark.slow
def test_command_replays_files_and_calibrated_traces(runs, tmp_path):
    import bench.simulate as command

    result, path = runs("fixed", 0)
    app = command.typer.Typer()
    app.command()(command.main)
    both = ["--policy", "fixed", "--policy", "resident", "--budget", str(HOT_ROWS["fixed"])]
    done = CliRunner().invoke(app, ["--trace", str(path), *both, "--json", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    assert [text.split()[0] for text in done.stderr.splitlines()] == ["policy", "fixed", "resident"]
    assert [row["policy"] for row in rows] == ["fixed", "resident"]
    assert [row["fetched_rows"] for row in rows] == [result.total.fetched_rows, 0]
    small = ["--k", "16", "--history", "500", "--steps", "10", "--requests", "2"]
    draft = ["--draft-length", "3", "--policy", "adaptive"]
    done = CliRunner().invoke(app, ["--trace", "calibrated", *small, *draft])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout.splitlines()[-1])["rows"][0]
    assert (row["steps"], row["tokens"], row["draft_length"]) == (10, 40, 3)
    assert 0 < row["fetched_share"] < 1
    for arguments in (
        ["--trace", str(tmp_path / "none")],
        ["--trace", "calibrated", "--accept-length", "2"],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2
        assert "error: " in done.output
