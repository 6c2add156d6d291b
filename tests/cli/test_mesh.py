"""`--mesh`, `--coordinator` and `--process`: what they refuse before a model is loaded."""

import pytest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "data=2,tensor=2"], "unknown axis 'tensor'; axes are data and expert"),
        (["--mesh", "data=64,expert=2"], "mesh data=64,expert=2 needs 128 devices, there are"),
        (["--mesh", "data=2", "--batch", "3"], "3 requests at the same time do not divide over"),
        (["--mesh", "data=1", "--record-selections", "file"], "records one device; leave --mesh"),
        (["--process", "0/2"], "--coordinator and --process go together"),
        (["--coordinator", "localhost:1", "--process", "0/2"], "several processes need --mesh"),
        (["--mesh", "data=2", "--coordinator", "a:1", "--process", "2/2"], "2/2 is not the number"),
    ],
)
def test_what_cannot_be_is_one_line(run, prompt, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in run("decode", "-p", prompt("a.txt", b"abc"), *options).error


def test_serve_refuses_likewise(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt_tokens": 4, "output_tokens": 2}\n')
    found = run("serve", "--trace", trace, "--mesh", "data=2", "--batch", 5)
    assert "5 requests at the same time do not divide over" in found.error
