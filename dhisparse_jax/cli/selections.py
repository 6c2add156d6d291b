"""`--record-selections`: what every step selects, in a file for the simulator."""

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from dhisparse_jax.cli.report import OutputFile

if TYPE_CHECKING:
    from dhisparse_jax.engine.engine import Engine


@contextlib.contextmanager
def recorded(engine: "Engine", output: OutputFile | None) -> Generator[None, None, None]:
    """Record what `engine` selects in the body, whatever ends it; nothing for None.

    The engine must have been made for it, and no request may be in it yet.

    Raises:
        OSError: after the body, if the recording could not be written; it is not kept then.
    """
    if output is None:
        yield
        return
    from dhisparse_jax.engine.recording import Recorder

    with output.open() as file:
        recorder = Recorder(file, engine.cfg)
        before, engine.watcher = engine.watcher, recorder
        try:
            yield
        finally:
            engine.watcher = before
            recorder.finish()
            output.keep()
