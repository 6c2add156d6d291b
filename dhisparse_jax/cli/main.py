"""Entry point of `dhisparse`: sub-commands, errors to one line each, exit codes.

Exit codes: 0 done; 1 verify-hf or audit found a difference, or the reader of standard output went
away (as typer does it); 2 bad input, or a machine that cannot do it; 130 interrupted.
"""

import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from dhisparse_jax.cli.audit import audit
from dhisparse_jax.cli.convert import convert
from dhisparse_jax.cli.decode import decode
from dhisparse_jax.cli.doctor import doctor
from dhisparse_jax.cli.evaluate import evaluate
from dhisparse_jax.cli.interrupt import INTERRUPTED
from dhisparse_jax.cli.meeting import Alone, leave
from dhisparse_jax.cli.plan import plan
from dhisparse_jax.cli.serve import serve
from dhisparse_jax.cli.verify_hf import verify_hf
from dhisparse_jax.errors import UserError

BAD_INPUT = 2

# Typer carries its own copy of click, whose base of all usage errors has no public name.
USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="dhisparse",
    help="Decode long texts with sparse attention over a KV hierarchy: all history in host "
    "memory, what is needed on the device, and never another token.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(decode)
app.command()(evaluate)
app.command()(convert)
app.command()(serve)
app.command()(doctor)
app.command()(audit)
app.command()(plan)
app.command("verify-hf")(verify_hf)


def print_version(wanted: bool) -> None:
    """Print the versions that a bug report needs, and stop."""
    if not wanted:
        return
    versions = {name: importlib.metadata.version(name) for name in ("dhisparse-jax", "jax")}
    typer.echo(f"dhisparse {versions['dhisparse-jax']} (jax {versions['jax']})")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Show the help where no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: by default those of the process.

    Returns:
        The exit code; see the module.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # texts hold characters that a terminal may lack
    try:
        return run(lambda: command(arguments))
    except Alone as left:
        leave(left_alone(left.reason))


def left_alone(reason: BaseException) -> int:
    """Say what ends this process while others are not done; the exit code."""
    if isinstance(reason, BrokenPipeError):
        return 1  # as typer does it

    def again() -> int:
        raise reason

    try:
        return run(again)
    except BaseException:
        traceback.print_exc()
        return 1


def command(arguments: Sequence[str] | None) -> object:
    """What the command line asks for; what that returns."""
    with terminated_as_interrupted():
        return app(args=arguments, prog_name="dhisparse", standalone_mode=False)


def run(what: Callable[[], object]) -> int:
    """Do something, with one line for every error that a person can act on; the exit code."""
    try:
        result = what()
    except UserError as error:
        return fail(str(error))
    except USAGE_ERROR as error:
        return fail(usage_message(cast("typer.BadParameter", error)))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:  # of files, the commands say more: what is left are the streams
        return fail(f"cannot write the output: {error.strerror or error}")
    except (RuntimeError, MemoryError, AssertionError) as error:
        message = machine_message(error)
        if message is None:
            raise
        return fail(message)
    return result if isinstance(result, int) else 0


@contextlib.contextmanager
def terminated_as_interrupted() -> Generator[None, None, None]:
    """Take SIGTERM as Ctrl-C, also where a command has no steps to end between."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def machine_message(error: Exception) -> str | None:
    """What the machine lacks, and what to change; None where the program is at fault."""
    text = str(error)
    if isinstance(error, MemoryError):
        what = f": {text}" * bool(text)
        return f"out of memory on the host{what}; shorten the texts, lower --batch or --host-memory"
    if "RESOURCE_EXHAUSTED" in text:
        return (
            f"out of memory: {text}; lower --batch, --hot-rows or --draft-length, shorten the "
            "texts, or keep their history in --kv-format fp8"
        )
    if text.startswith("Unable to initialize backend"):
        return text
    wanted = os.environ.get("JAX_PLATFORMS")
    if wanted and isinstance(error, AssertionError) and _raised_in(error, "xla_bridge.py"):
        return f"JAX_PLATFORMS={wanted}: there is no such device here; unset it, or set it to cpu"
    return None


def _raised_in(error: Exception, file: str) -> bool:
    """Whether the innermost frame is in a file of this name."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).name == file


def usage_message(error: typer.BadParameter) -> str:
    """What was wrong with the command line, and where to read on."""
    # The prefix is the parser's, not the person's.
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    return f"{message}; see {error.ctx.command_path} --help" if error.ctx else message


def fail(message: str) -> int:
    """Print one line on standard error. Returns the exit code for bad input."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return BAD_INPUT
