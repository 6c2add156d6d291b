"""`--mesh`, `--coordinator` and `--process`: what they refuse before a model is loaded."""

import inspect
import os
import socket
import subprocess
import sys

import pytest

from dhisparse_jax.cli import meeting, mesh_options
from dhisparse_jax.cli.decode import decode
from dhisparse_jax.errors import UserError
from tests.support.checkpoints import write_published


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
        (["--mesh", "data=2", "--coordinator", "a", "--process", "0/2"], "a is no address with a"),
        (["--mesh", "data=2", "--coordinator", "a:0", "--process", "0/2"], "a:0 is no address"),
        (["--mesh", "data=2", "--coordinator", ":9", "--process", "0/2"], ":9 is no address"),
        (["--mesh", "data=2", "--coordinator", "a:65536", "--process", "0/2"], "a:65536 is no"),
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


def test_processes_compare_every_option_by_its_name(run, monkeypatch, prompt):
    """All of `dhisparse decode`, but for those that each process may have to itself."""
    compared = {}

    def start(devices, told):
        compared.update(told)
        raise UserError("that is all")

    monkeypatch.setattr(mesh_options, "start", start)
    assert run("decode", "-p", prompt("a", b"abc"), "--mesh", "data=1").error == "that is all"
    own = {"json", "record_selections", "trace_dir", "prompt_file", "coordinator", "process"}
    given = set(inspect.signature(decode).parameters) - own
    wanted = {f"--{name.replace('_', '-')}" for name in given}
    beside = {"the number of prompts", "prompts", "--record-selections", "--draft-length auto"}
    assert compared.keys() == wanted | beside
    assert (compared["--policy"], str(compared["--mesh"])) == ("adaptive", "data=1")


class Others:
    """A `Company` of which nothing is real."""

    def __init__(self, lost):
        self.lost, self.did = lost, []

    def wait(self, seconds):
        return self.lost

    def part(self):
        self.did.append("part")

    def abandon(self):
        self.did.append("abandon")


@pytest.mark.parametrize(
    ("raised", "lost", "seen", "did"),
    [
        (None, "", None, ["part"]),
        (RuntimeError("closed by peer"), "1/2 ended", UserError("1/2 ended"), ["abandon"]),
        (RuntimeError("of its own"), "", RuntimeError("of its own"), ["abandon"]),
        (UserError("of its own"), "1/2 ended", UserError("of its own"), ["abandon"]),
        (KeyboardInterrupt(), "", KeyboardInterrupt(), ["abandon"]),
    ],
)
def test_an_error_is_that_of_the_process_that_ended(monkeypatch, raised, lost, seen, did):
    others, found = Others(lost), None
    monkeypatch.setattr(meeting, "meet", lambda *_: others)
    try:
        with meeting.together("a:1", "0/2"):
            if raised:
                raise raised
    except meeting.Alone as alone:
        found = alone.reason
    assert (type(found), str(found)) == (type(seen), str(seen))
    assert others.did == did


MAIN = "import sys; from dhisparse_jax.cli.main import main; sys.exit(main())"


@pytest.mark.slow
def test_processes_of_which_one_cannot_go_on_end_with_a_line_each(tmp_path):
    (tmp_path / "0" / "model").mkdir(parents=True)
    (tmp_path / "1").mkdir()
    (tmp_path / "a").write_bytes(b"some text")
    write_published(tmp_path / "0" / "model")
    with socket.create_server(("", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    arguments = ["-m", "model", "-p", "../a", "--mesh", "data=2", "--coordinator", address]
    start = lambda number: subprocess.Popen(
        [sys.executable, "-c", MAIN, "decode", *arguments, "--process", f"{number}/2"],
        cwd=tmp_path / str(number),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes = [start(number) for number in range(2)]
    said = [process.communicate(timeout=240)[1].splitlines() for process in processes]
    assert said == [
        ["error: process 1/2 ended before the others were done; see what it said"],
        ["error: unknown model model: neither a bundled one (tiny) nor the folder of a checkpoint"],
    ]
    assert [process.returncode for process in processes] == [2, 2]
