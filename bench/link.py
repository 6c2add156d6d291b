"""The link between host and device, through the library's own operations: `python -m bench.link`.

Read rate by record size and by the bytes that the records are spread over, write rate, and the
time of calls of a few records. On a CPU host and device memory are the same, and the figures are
those of a gather and a scatter.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax
import typer

from bench.kernels import CONSOLE, floors_for, production, report, run
from bench.ops.backup import Backup
from bench.ops.copies import CopySizes
from bench.ops.retrieve import Retrieve
from bench.work import Case
from dhisparse_jax.engine.rates import RECORD_WORDS
from dhisparse_jax.engine.timing import RUNS
from pallas_kernels.common.rows import WORD_BYTES

CALL_BYTES = 48 << 20
FEW = (1, 64)
SPANS: dict[str, dict[str, int]] = {
    "0.7GB": {"used": 1, "reach": 700_000_000},
    "4GB": {"used": 1},
    "26GB": {},
}
"""Sizes that spread the records over so many bytes; the last over all pools."""

ON_CPU = "no link: host and device memory are the same, figures are those of gather and scatter"


def _reads(words: int) -> dict[str, Case]:
    size = words * WORD_BYTES
    many = {
        f"read_{size}B_{name}": Retrieve(CopySizes(words=words, records=CALL_BYTES // size, **span))
        for name, span in SPANS.items()
    }
    few = {
        f"read_{size}B_{records}_records": Retrieve(
            CopySizes(words=words, records=records, calls=24)
        )
        for records in FEW
    }
    return {**many, **few}


def _writes(words: int) -> dict[str, Case]:
    """A call writes to all pools in use, the few records to one."""
    size = words * WORD_BYTES
    many: dict[str, Case] = {}
    for name, span in SPANS.items():
        sizes = CopySizes(words=words, records=1, **span)
        records = CALL_BYTES // (size * sizes.written)
        many[f"write_{size}B_{name}"] = Backup(dataclasses.replace(sizes, records=records))
    few = {
        f"write_{size}B_{records}_records": Backup(
            CopySizes(words=words, records=records, used=1, calls=24)
        )
        for records in FEW
    }
    return {**many, **few}


def cases() -> Iterator[tuple[str, dict[str, Case]]]:
    """Operations with their cases. All that have the same pools follow each other, writes last."""
    for words in RECORD_WORDS:
        yield "retrieve", _reads(words)
        yield "backup", _writes(words)


def main(
    case: Annotated[str, typer.Option(help="Only cases with this in their name.")] = "",
    small: Annotated[bool, typer.Option("--small", help="Sizes for a CPU.")] = False,
    runs: Annotated[int, typer.Option(help="Timed runs of each case.")] = RUNS,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure reads and writes of host memory."""
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        CONSOLE.print(ON_CPU)
    floors = floors_for(runs, small=small or on_cpu)
    rows = (
        run(job, floors, runs=runs)
        for operation, sized in cases()
        for job in production(operation, sized, small=small)
        if case in job.case
    )
    report("link", floors, rows, json, small=small, **({"meaning": ON_CPU} if on_cpu else {}))


if __name__ == "__main__":
    typer.run(main)
