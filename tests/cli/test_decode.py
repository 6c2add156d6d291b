"""`dhisparse decode` on a fake engine: what it prints, writes and refuses."""

import errno
import json
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from dhisparse_jax.cli.options import DraftOptions, PolicyName
from dhisparse_jax.cli.report import OutputFile
from tests.cli.fake_engine import FakeLoaded
from tests.support import small_v4, small_v41


def interrupt_at(step_number):
    def on_step(step):
        if step == step_number:
            raise KeyboardInterrupt

    return on_step


def test_one_request_puts_its_text_alone_on_standard_output(run, fake, prompt):
    result = run("decode", "-p", prompt("a.txt", b"xa"), "-n", 5)
    assert result.code == 0
    assert result.out == b"bcdef"
    assert "end early" not in result.err
    assert "What the hierarchy did" in result.err
    assert "a.txt, 2 tokens" in result.err


def test_bytes_that_are_no_text_reach_a_pipe_unchanged(run, fake, prompt):
    result = run("decode", "-p", prompt("a.txt", b"\xfe"), "-n", 3)
    assert result.out == b"\xff\x00\x01"


def test_several_requests_print_each_text_under_its_heading(run, fake, prompt):
    result = run("decode", "-p", prompt("a", b"a"), "-p", prompt("b", b"0"), "-n", 3)
    text = result.out.decode()
    assert "==> a: 1 prompt tokens, 3 new, length <==\nbcd\n" in text
    assert "==> b: 1 prompt tokens, 3 new, length <==\n123\n" in text
    assert text.index("Requests") < text.index("What the hierarchy did")


def test_document_holds_tokens_and_metrics(run, fake, prompt, tmp_path):
    path = tmp_path / "out.json"
    result = run("decode", "-p", prompt("a", b"a"), "-n", 3, "--policy", "fixed", "--json", path)
    document = json.loads(path.read_text())
    assert result.code == 0
    assert document["requests"] == [
        {
            "name": "a",
            "prompt_tokens": 1,
            "new_tokens": 3,
            "tokens": [98, 99, 100],
            "finish_reason": "length",
        }
    ]
    head = {key: document[key] for key in ("model", "backend", "jax_version", "policy", "draft")}
    assert head == {
        "model": "tiny",
        "backend": "cpu",
        "jax_version": "0",
        "policy": "fixed",
        "draft": "dflash2",
    }
    metrics = document["metrics"]
    assert metrics["output_tokens"] == 3
    assert metrics["steps"] == 2
    assert metrics["selected_rows"] == 16
    assert metrics["fetched_rows"] == 4
    assert metrics["fetched_share"] == pytest.approx(0.25)
    assert metrics["host_bytes_read"] == 512
    assert metrics["host_bytes"] == 3 << 20
    assert metrics["hot_bytes"] == 1 << 20
    assert metrics["tail_bytes"] == 2048
    assert metrics["accept_length"] == 2.0
    assert metrics["accept_by_position"] == [1.0, 0.0]
    assert metrics["draft_seconds"] == 0.5
    assert metrics["draft_bytes"] == 0
    spent = max(metrics["decode_seconds"] - 0.5, 0.0)
    assert metrics["verify_seconds"] == pytest.approx(spent)
    assert metrics["tokens_per_s"] == pytest.approx(3 / metrics["seconds"])


def test_document_replaces_the_old_one_with_ordinary_permissions(run, fake, prompt, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    before = os.umask(0o022)
    try:
        run("decode", "-p", prompt("a", b"a"), "-n", 1, "--json", path)
    finally:
        os.umask(before)
    assert json.loads(path.read_text())["metrics"]["output_tokens"] == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a", "out.json"]


def test_document_can_go_to_a_device(run, fake, prompt):
    assert run("decode", "-p", prompt("a", b"a"), "-n", 1, "--json", os.devnull).code == 0
    assert not os.path.isfile(os.devnull)


def test_a_document_on_standard_output_is_alone_there(run, fake, prompt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("decode", "-p", prompt("a", b"a"), "-p", prompt("b", b"b"), "-n", 3, "--json", "-")
    assert json.loads(result.out)["metrics"]["output_tokens"] == 6
    assert "selected rows" in result.err
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a", "b"]


def test_nothing_lies_beside_the_document_while_it_is_not_written(run, fake, prompt, tmp_path):
    """So that `kill -9` leaves nothing."""
    seen = set()
    fake.engine.on_step = lambda step: seen.update(child.name for child in tmp_path.iterdir())
    assert run("decode", "-p", prompt("a", b"a"), "--json", tmp_path / "out.json").code == 0
    assert seen == {"a"}


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="this system has no files without a name")
def test_nothing_lies_beside_a_recording_while_it_is_written(tmp_path):
    path = tmp_path / "run.sel"
    path.write_bytes(b"before")
    output = OutputFile(path)
    with output.open() as file:
        file.write(b"some")
        file.flush()
        assert [child.name for child in tmp_path.iterdir()] == ["run.sel"]
        output.keep()
    assert path.read_bytes() == b"some"
    output.open().close()
    output.discard()
    assert [child.name for child in tmp_path.iterdir()] == ["run.sel"]
    assert path.read_bytes() == b"some"


def test_a_document_is_whole_where_files_have_names_at_once(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    output = OutputFile(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []
    output.write({"a": 1})
    assert [child.name for child in tmp_path.iterdir()] == ["out.json"]
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}
    assert (tmp_path / "out.json").stat().st_mode & 0o400


def test_failure_leaves_no_file_behind(run, fake, prompt, tmp_path):
    path = tmp_path / "out.json"
    assert "context" in run("decode", "-p", prompt("a", b"a" * 99), "--json", path).error
    assert [child.name for child in tmp_path.iterdir()] == ["a"]


def test_interrupt_keeps_text_document_and_table(run, fake, prompt, tmp_path):
    fake.engine.on_step = interrupt_at(3)
    path = tmp_path / "out.json"
    result = run("decode", "-p", prompt("a", b"a"), "-p", prompt("b", b"0"), "--json", path)
    assert result.code == 130
    assert "==> a: 1 prompt tokens, 3 new, interrupted <==\nbcd\n" in result.out.decode()
    assert "What the hierarchy did" in result.out.decode()
    document = json.loads(path.read_text())
    assert [item["finish_reason"] for item in document["requests"]] == ["interrupted"] * 2
    assert document["metrics"]["output_tokens"] == 6


def test_termination_is_an_interrupt(run, fake, prompt, tmp_path):
    fake.engine.on_step = lambda step: signal.raise_signal(signal.SIGTERM) if step == 2 else None
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "out.json"
    assert run("decode", "-p", prompt("a", b"a"), "--json", path).code == 130
    assert json.loads(path.read_text())["requests"][0]["tokens"] == [98, 99]
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a", "out.json"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_waits_until_the_report_is_written(run, fake, prompt, tmp_path):
    """One that comes when the texts are done."""
    fake.engine.draft_step_seconds = lambda: signal.raise_signal(signal.SIGTERM) or 0.0
    path = tmp_path / "out.json"
    result = run("decode", "-p", prompt("a", b"a"), "-n", 3, "--json", path)
    assert result.code == 130
    assert "What the hierarchy did" in result.err
    document = json.loads(path.read_text())
    assert document["requests"][0]["finish_reason"] == "length"
    assert document["requests"][0]["tokens"] == [98, 99, 100]


def test_names_are_shown_as_they_are(run, fake, prompt):
    a, b = prompt("[bold]a", b"a"), prompt("b\udcff\n", b"b")
    text = run("decode", "-p", a, "-p", b, "-n", 1).out.decode()
    assert "==> [bold]a: 1 prompt" in text
    assert "==> b\ufffd\ufffd: 1 prompt" in text
    assert "[bold]a" in text[text.index("Requests") :]


def test_interrupt_while_loading_exits_130(run, fake, prompt, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dhisparse_jax.cli.session.load_model", interrupted)
    assert run("decode", "-p", prompt("a", b"a")).code == 130


def test_requests_end_at_the_context_and_at_stop_tokens(run, fake, prompt, tmp_path):
    fake.loaded = FakeLoaded(eos=(ord("e"),))
    path = tmp_path / "out.json"
    long = prompt("long", b"0" * 60)
    result = run("decode", "-p", prompt("a", b"a"), "-p", long, "-n", 50, "--json", path)
    line = "texts that end early: 1 of 2, after 4 of 50 new tokens; tiny has a context of 64"
    assert line in result.err
    requests = json.loads(path.read_text())["requests"]
    assert [item["finish_reason"] for item in requests] == ["stop", "context"]
    assert requests[0]["tokens"] == list(b"bcde")
    assert requests[1]["new_tokens"] == 4


def test_options_reach_the_engine(run, fake, prompt):
    a = prompt("a", b"abc")
    run("decode", "-p", a, "-n", 9, "--policy", "fixed", "--hot-rows", 7, "--batch", 2)
    options = fake.asked["options"]
    assert (options.policy, options.hot_rows, options.batch) == (PolicyName.FIXED, 7, 2)
    assert fake.asked["positions"] == 12
    assert fake.asked["requests"] == 1
    assert fake.asked["model"] == "tiny"


def test_room_is_no_more_than_the_context(run, fake, prompt):
    run("decode", "-p", prompt("a", b"abc"), "-n", 900)
    assert fake.asked["positions"] == 64


def test_standard_input_is_a_prompt(run, fake, monkeypatch):
    class Input:
        class buffer:
            read = staticmethod(lambda: b"a")

    monkeypatch.setattr(sys, "stdin", Input)
    assert run("decode", "-p", "-", "-n", 2).out == b"bc"


def test_default_prompts_are_four_texts_of_different_lengths(run, fake, tmp_path):
    fake.loaded = FakeLoaded(context=8192)
    fake.engine.context = 8192
    path = tmp_path / "out.json"
    assert run("decode", "-n", 1, "--json", path).code == 0
    lengths = [item["prompt_tokens"] for item in json.loads(path.read_text())["requests"]]
    assert len(set(lengths)) == 4
    assert 1000 < min(lengths) < 2000 < 5500 < max(lengths) <= 6000


def test_default_prompts_fit_a_small_context(run, fake):
    assert run("decode", "-n", 4).code == 0


def test_trace_is_written_into_a_new_folder(run, fake, prompt, tmp_path):
    folder = tmp_path / "deep" / "trace"
    assert run("decode", "-p", prompt("a", b"a"), "-n", 1, "--trace-dir", folder).code == 0
    assert list(folder.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing", None, "no such file"),
        ("empty", b"", "is empty; at least one byte is needed"),
        ("long", b"a" * 64, "long has 64 tokens; tiny has a context of 64"),
    ],
)
def test_bad_prompts_are_refused(run, fake, tmp_path, name, data, message):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    assert message in run("decode", "-p", path).error


def test_too_long_a_prompt_says_how_long_it_may_be(run, fake, prompt):
    assert "shorten it to 63 or less" in run("decode", "-p", prompt("a", b"a" * 70)).error


def test_a_folder_is_no_prompt(run, fake, tmp_path):
    assert f"{tmp_path} is a directory" in run("decode", "-p", tmp_path).error


def test_document_path_is_checked_before_the_model_loads(run, fake, prompt, tmp_path):
    a = prompt("a", b"a")
    for path, message in [
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "x.json", "there is no folder"),
        (a / "x.json", "there is no folder"),
    ]:
        assert message in run("decode", "-p", a, "--json", path).error
    assert fake.asked == {}


def test_a_file_is_no_trace_folder(run, fake, prompt):
    a = prompt("a", b"a")
    assert "is a file; name a folder" in run("decode", "-p", a, "--trace-dir", a).error
    assert "cannot be made" in run("decode", "-p", a, "--trace-dir", a / "below").error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hot-rows", "0"], "'--hot-rows': 0 is not in the range 1 to"),
        (["--hot-rows", "-4"], "'--hot-rows': -4 is not in the range 1 to"),
        (["--batch", "0"], "'--batch': 0 is not in the range 1 to"),
        (["-n", "0"], "0 is not in the range 1 to"),
        (["--max-new-tokens", "many"], "'--max-new-tokens'"),
        (["--temperature", "nan"], "'--temperature': nan is not a number of at least 0"),
        (["--temperature", "1e300"], "'--temperature': 1e+300 is not a number of at least 0"),
        (["--top-k", "99999999999"], "'--top-k': 99999999999 is not in the range"),
        (["--temperature", "-1"], "'--temperature': -1.0 is not a number of at least 0"),
        (["--temperature", "inf"], "'--temperature'"),
        (["--top-k", "-1"], "'--top-k'"),
        (["--top-p", "0"], "'--top-p': 0.0 is not above 0 and at most 1"),
        (["--top-p", "nan"], "'--top-p'"),
        (["--seed", "-1"], "'--seed'"),
        (["--seed", str(2**32)], "'--seed'"),
        (["--policy", "lru"], "'lru' is not one of 'adaptive', 'fixed', 'resident'"),
        (["--prompt-file"], "requires an argument"),
        (["--nonsense"], "No such option: --nonsense"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_bad_options_are_refused(run, fake, arguments, message):
    assert message in run("decode", *arguments).error
    assert fake.asked == {}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), DraftOptions("dflash2", None, False)),
        (("--model", "some/where"), DraftOptions("none", None, False)),
        (("--model", small_v41.FIXTURE), DraftOptions("dspark", None, False)),
        (("--model", small_v4.FIXTURE), DraftOptions("none", None, False)),
        (("--model", small_v41.FIXTURE, "--draft", "none"), DraftOptions("none", None, False)),
        (("--draft", "none"), DraftOptions("none", None, False)),
        (("--draft", "dspark"), DraftOptions("dspark", None, False)),
        (("--draft", "some/where", "--draft-length", 3), DraftOptions("some/where", 3, False)),
        (("--draft", "dflash2", "--draft-length", "auto"), DraftOptions("dflash2", None, True)),
    ],
)
def test_draft_options(run, fake, prompt, arguments, wanted):
    assert run("decode", "-p", prompt("a", b"a"), "-n", 1, *arguments).code == 0
    assert fake.asked["draft_options"] == wanted
    assert fake.asked["queries"] == 1  # no draft is loaded here


@pytest.mark.parametrize("length", ["0", "-1", "2.5", "many", ""])
def test_draft_length_that_means_nothing(run, fake, prompt, length):
    error = run("decode", "-p", prompt("a", b"a"), "--draft-length", length).error
    assert "is neither auto nor a number of at least 1" in error


def test_tokens_are_kept_when_the_output_cannot_be_written(run, fake, prompt, tmp_path):
    def full(step):
        if step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake.engine.on_step = full
    path = tmp_path / "out.json"
    result = run("decode", "-p", prompt("a", b"a"), "--json", path)
    assert result.code == 2
    assert result.err.endswith("error: cannot write the output: No space left on device\n")
    assert json.loads(path.read_text())["metrics"]["output_tokens"] >= 2


def test_a_document_does_not_replace_a_prompt(run, prompt):
    path = prompt("a", b"text")
    result = run("decode", "-p", path, "--json", path)
    assert result.code == 2
    assert result.error.endswith("is also read; name another file")
    result = run("decode", "-p", path, "--record-selections", path)
    assert result.error == f"--record-selections {path} is also read; name another file"
    assert Path(path).read_bytes() == b"text"


def test_recorded_selections_have_a_file_of_their_own(run, fake, prompt, tmp_path):
    a, out = prompt("a", b"a"), tmp_path / "out"
    both = ("--json", out, "--record-selections", out)
    assert run("decode", "-p", a, *both).error.endswith(f"are both {out}; name two files")
    error = run("decode", "-p", a, "--record-selections", tmp_path).error
    assert error == f"--record-selections {tmp_path} is a directory; name a file"
    error = run("decode", "-p", a, "--record-selections", "-").error
    assert error == "--record-selections -: only --json goes to standard output; name a file"
    assert fake.asked == {}
    assert [child.name for child in tmp_path.iterdir()] == ["a"]
