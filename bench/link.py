"""The link between host and device, through the library's own operations: `python -m bench.link`.

Read rate by record size and by the bytes that the records are spread over, write rate, and the
time of calls of a few records. On a CPU host and device memory are the same, and the figures are
those of a gather and a scatter.
"""

from pathlib import Path
from typing import Annotated

import jax
import typer

from bench.kernels import CONSOLE, floors_for, production, report, run
from bench.ops.backup import Backup
from bench.ops.copies import CopySizes
from bench.ops.retrieve import Retrieve
from bench.timing import RUNS
from bench.work import Case
from pallas_kernels.common.rows import WORD_BYTES

CALL_BYTES = 48 << 20
FEW = (1, 8, 64)
READ_WORDS = (164, 288, 672, 1152, 2624)
WRITE_WORDS = (164, 672, 1152)

SPANS: dict[str, dict[str, int]] = {
    "0.7GB": {"used": 1, "reach": 700_000_000},
    "4GB": {"used": 1},
    "26GB": {},
}
"""Sizes that spread the records over so many bytes; the last over all pools."""

ON_CPU = "no link: host and device memory are the same, figures are those of gather and scatter"


def _sizes(words: int) -> dict[str, CopySizes]:
    records = CALL_BYTES // (words * WORD_BYTES)
    return {
        f"{words * WORD_BYTES}B_{name}": CopySizes(words=words, records=records, **span)
        for name, span in SPANS.items()
    }


def cases() -> dict[str, dict[str, Case]]:
    """Cases by operation; those with the same pools follow each other."""
    reads: dict[str, Case] = {}
    writes: dict[str, Case] = {}
    for words in READ_WORDS:
        reads |= {f"read_{name}": Retrieve(sizes) for name, sizes in _sizes(words).items()}
        if words in WRITE_WORDS:
            for records in FEW:
                few = CopySizes(words=words, records=records, calls=24)
                reads[f"read_{words * WORD_BYTES}B_{records}_records"] = Retrieve(few)
    for words in WRITE_WORDS:
        writes |= {f"write_{name}": Backup(sizes) for name, sizes in _sizes(words).items()}
        for records in FEW:
            few = CopySizes(words=words, records=records, calls=24)
            writes[f"write_{words * WORD_BYTES}B_{records}_records"] = Backup(few)
    return {"retrieve": reads, "backup": writes}


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
    rows = [
        run(job, floors, runs=runs)
        for operation, sized in cases().items()
        for job in production(operation, sized, small=small)
        if case in job.case
    ]
    report("link", floors, rows, json, small=small, **({"meaning": ON_CPU} if on_cpu else {}))


if __name__ == "__main__":
    typer.run(main)
