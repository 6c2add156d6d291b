"""The entry point: help, version, one-line errors, exit codes, and that help is quick."""

import subprocess
import sys

import pytest

from dhisparse_jax.cli import main as entry
from dhisparse_jax.cli.options import PolicyName
from dhisparse_jax.config import Policy
from dhisparse_jax.errors import UserError

COMMANDS = ("decode", "evaluate", "serve", "verify-hf")


def test_help_names_the_commands(run):
    result = run("--help")
    assert result.code == 0
    assert all(name in result.out.decode() for name in COMMANDS)


def test_no_command_shows_the_help(run):
    assert run().out == run("--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_states_defaults(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert b"[default: adaptive]" in result.out
    assert b"--hot-rows" in result.out


def test_version_names_the_package_and_jax(run):
    result = run("--version")
    assert result.code == 0
    assert result.out.startswith(b"dhisparse 0.")
    assert b"(jax 0." in result.out


def test_unknown_command_is_refused(run):
    assert run("sing").error == "No such command 'sing'; see dhisparse --help"


def test_user_error_is_one_line(run, monkeypatch):
    def refuse(*_arguments, **_options):
        raise UserError("first\nsecond")

    monkeypatch.setattr(entry, "app", refuse)
    assert run("decode").error == "first second"


def test_a_fault_of_the_program_is_not_hidden(run, monkeypatch):
    def fail(*_arguments, **_options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(entry, "app", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("decode")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("RESOURCE_EXHAUSTED: 9 bytes"),
            "out of memory: RESOURCE_EXHAUSTED: 9 bytes;",
        ),
        (MemoryError(), "out of memory on the host; shorten the texts, lower --batch or --host-"),
        (RuntimeError("Unable to initialize backend 'x'"), "Unable to initialize backend 'x'"),
    ],
)
def test_what_the_machine_lacks_is_one_line(run, monkeypatch, error, message):
    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(entry, "app", fail)
    assert message in run("decode").error


def test_policies_are_those_of_the_library():
    assert {policy.value for policy in PolicyName} == {policy.value for policy in Policy}


def test_help_imports_neither_jax_nor_numpy():
    code = (
        "import sys; from dhisparse_jax.cli.main import main; main(['decode', '--help']);"
        "sys.exit(bool({'jax', 'numpy', 'flax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_gives_no_traceback(tmp_path):
    code = (
        "import sys; from dhisparse_jax.cli.main import main\n"
        "for _ in range(2000): main(['--help'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_more_steps_at_once_than_make_sense_are_refused(run):
    result = run("decode", "--dispatch-steps", 10**20)
    assert result.code == 2
    assert "is not in the range 1 to 1024" in result.err


def test_a_platform_that_is_not_there_is_one_line(run, monkeypatch):
    """JAX asserts that it has found a device of the platform that was named."""
    code = compile("assert False", "somewhere/xla_bridge.py", "exec")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("dhisparse_jax.cli.main.app", lambda **_: exec(code))
    result = run("doctor")
    assert result.code == 2
    assert result.err.startswith("error: JAX_PLATFORMS=cuda: there is no such device here")
