"""`dhisparse doctor`: what this machine is to the hierarchy, and what to change about it."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dhisparse_jax.cli import checking_options as own
from dhisparse_jax.cli import machine
from dhisparse_jax.cli.advice import advice, meaning
from dhisparse_jax.cli.interrupt import interrupts
from dhisparse_jax.cli.report import OutputFile, on_standard_output, output_files

if TYPE_CHECKING:
    from dhisparse_jax.engine.rates import ReadRate

RUNS = 5
CALL_BYTES = 48 << 20
"""Of records in one read, on an accelerator: as `python -m bench.link` reads."""

SPANS = (700_000_000, 4 << 30)
CPU_SPANS, CPU_CALL_BYTES = (16 << 20, 128 << 20), 4 << 20
MOST_OF_FREE = 4
"""A span takes at most one part in so many of the free memory, on the host and on the device."""


def doctor(json: own.Json = None) -> None:
    """Say what this machine is to the hierarchy, and what to change about it; in under a minute.

    Devices and their memory kinds, the limit of pinned memory, the rates of device memory and of
    the link by record size and by the bytes that the records are spread over, which implementation
    each operation gets and why, and versions.
    """
    with output_files({"--json": json}, ()) as (output,):
        work(output)


def work(output: OutputFile | None) -> None:
    """Look, measure, and report, also when interrupted."""
    from dhisparse_jax.cli.doctor_tables import print_document

    begin = time.monotonic()
    document: dict[str, Any] = {"complete": False}
    err = Console(stderr=True)
    with interrupts() as check:
        try:
            for name, found in parts(document):
                document[name] = found
                if err.is_terminal:
                    err.print(f"{name}: done", style="dim")
                check()
            document["complete"] = True
        finally:  # a signal waits until it is written
            document["seconds"] = time.monotonic() - begin
            if output:
                output.write(document)
        print_document(Console(stderr=on_standard_output(output)), document)
        check()


def parts(known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parts of the document in order; each may read those before it in `known`."""
    import jax

    yield "versions", machine.versions()
    yield "backend", jax.default_backend()
    yield "meaning", meaning(known["backend"])
    yield "devices", machine.devices()
    yield "gpu_memory_bytes", machine.gpu_memory_bytes()
    yield "host", machine.host()
    yield "compilation_cache", os.environ.get(machine.CACHE_VARIABLE) or None
    yield "compilation_cache_error", machine.unwritable(known["compilation_cache"])
    measurable = known["backend"] in ("cpu", "gpu")
    yield "kernels", kernels() if measurable else []
    yield "rates", rates() if measurable else None
    yield "reads", []
    spans, left_out = affordable_spans() if measurable else ((), [])
    yield "spans_left_out", left_out
    for rate in reads(spans):
        yield "reads", [*known["reads"], rate._asdict()]
    yield "advice", advice(known)


def kernels() -> list[dict[str, str]]:
    """What every operation of a decode step gets, for every format that history has."""
    from dhisparse_jax.engine.kernels import FORMATS, kernel_choices

    return [
        {"format": stored, **decision._asdict()}
        for stored in FORMATS
        for decision in kernel_choices(stored).values()
    ]


def rates() -> dict[str, float]:
    """Rates of memory, the whole link, and the matrix units; copies take a part of free memory."""
    import jax

    from dhisparse_jax.engine.memory import free_device_bytes
    from dhisparse_jax.engine.rates import CPU_FLOORS, measure_floors

    if jax.default_backend() == "cpu":
        return measure_floors(RUNS, **CPU_FLOORS)._asdict()
    copied = min(2 << 30, free_device_bytes() // MOST_OF_FREE)
    return measure_floors(RUNS, copy_bytes=copied)._asdict()


def affordable_spans() -> tuple[tuple[int, ...], list[dict[str, Any]]]:
    """Spans that fit into a part of what is free, and the others, with the reason."""
    import jax

    from dhisparse_jax.engine.memory import free_device_bytes, free_host_bytes

    spans = CPU_SPANS if jax.default_backend() == "cpu" else SPANS
    most = min(free_device_bytes(), free_host_bytes()) // MOST_OF_FREE
    reason = f"a pool of this size is more than 1/{MOST_OF_FREE} of the free memory"
    fit = tuple(span for span in spans if span <= most)
    return fit, [{"span_bytes": span, "why": reason} for span in spans if span > most]


def reads(spans: tuple[int, ...]) -> "Iterator[ReadRate]":
    """Read rates by record size and span."""
    import jax

    from dhisparse_jax.engine.rates import RECORD_WORDS, read_rates

    call_bytes = CPU_CALL_BYTES if jax.default_backend() == "cpu" else CALL_BYTES
    if not spans:
        return
    for words in RECORD_WORDS:
        yield from read_rates(words, spans, call_bytes=call_bytes, runs=RUNS)
