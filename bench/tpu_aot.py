"""The TPU kernels at production sizes, compiled ahead of time: nothing here runs on a TPU.

    python -m bench.tpu_aot --topology v5e:2x2 --json bench/results/tpu/kernels_v5e.json
    python -m bench.tpu_aot --topology v6e:2x2 --op sparse_attention
    python -m bench.tpu_aot --topology v6e:2x2 --model glm-5.3 --json step_v6e.json
    python -m bench.tpu_aot --topology v5e:2x2 --model glm-5.3 --heads-over 8 --layers 6

libtpu (`pip install 'dhisparse-jax[tpu]'`) is the compiler of a TPU and needs none. For every case
the result has what the compiler says of memory and cost, and beside it a model: the bytes that the
kernel moves by design over published rates. No row has a measured time.

With `--model` it is the whole decode step of one chip's share (`bench.tpu_decode`): the routed
experts are shared with all other chips, heads with few or none; all layers, since groups of one
kind share a program (`bench.shard_segments`). All operands have to fit into the memory of the chip
together, by libtpu's count, with 268 MB beside them, which no program may exceed. The model of its
traffic is its weights once, the index keys once and the rows of every query; what is fetched
depends on the text. Whatever is donated has to be updated in place, host pools above all, or the
command fails.

The compiler's costs are those of XLA around the kernels and of what the kernels declare; it does
not look into them. The rate of the host link is not published, so that is an assumption.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from bench.kernels import CONSOLE, Row
from bench.record import save, write
from bench.roofline import bound
from bench.shard_memory import tree_bytes
from bench.tpu_cases import CASES, TpuCase
from bench.tpu_decode import HEADS_OVER, share_of, step_row
from bench.tpu_report import (
    PUBLISHED,
    REFUSED,
    about,
    check_in_place,
    first_line,
    said_of,
    table,
    tell,
)
from bench.tpu_step import TOPOLOGIES, compile_for_tpu
from dhisparse_jax.errors import UserError


def compiled_row(operation: str, name: str, case: TpuCase, topology: str) -> Row:
    """Compile a case, and say what the compiler and the model say."""
    least = bound(case.traffic, PUBLISHED[TOPOLOGIES[topology]])
    row: Row = {"op": operation, "case": name, "time_us": None, "floor_us": least.us}
    detail: dict[str, Any] = {
        "backend": "tpu",
        "model": {**case.traffic._asdict(), "copies": case.copies},
    }
    try:
        donated = (0,) if case.donate else ()
        program = compile_for_tpu(
            jax.jit(case.function, donate_argnums=donated), case.operands, topology
        )
        detail |= said_of(program)
        if case.donate:
            check_in_place(detail["memory"], program.pool_bytes, tree_bytes(case.operands[0]))
    except REFUSED as reason:
        detail["reason"] = first_line(reason)
    tell(row, detail, least)
    return {**row, "ratio": None, "bound": least.name, "detail": detail}


def _chosen(op: str | None, case: str) -> Iterator[tuple[str, str, TpuCase]]:
    """Cases of one operation, or all, whose names match."""
    for operation in [op] if op else CASES:
        for name, each in CASES[operation].items():
            if re.search(case, name):
                yield operation, name, each


def main(  # noqa: PLR0913  # a command's options
    topology: Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")] = "v5e:2x2",
    op: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    case: Annotated[
        str, typer.Option(help="Only cases whose name has a match of this regex.")
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="The decode step of this preset instead: glm-5.3 or tiny.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Only so many layers of it.")] = None,
    chips: Annotated[int, typer.Option(help="Chips that share its routed experts.")] = 256,
    heads_over: Annotated[
        int | None,
        typer.Option(
            help="Chips of those that share its heads, dense MLPs and vocabulary, and requests; "
            f"{' and '.join(f'{chips} for a {name}' for name, chips in HEADS_OVER.items())}."
        ),
    ] = None,
    draft: Annotated[str, typer.Option(help="dflash2, dspark or none.")] = "none",
    requests: Annotated[
        int, typer.Option(help="Requests on the chip, or on the chips that share its heads.")
    ] = 2,
    context: Annotated[int, typer.Option(help="Positions of each.")] = 100_000,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Compile the TPU kernels, or a decode step, for a TPU that is not there."""
    if topology not in TOPOLOGIES:
        raise typer.BadParameter(f"{topology} is none of {', '.join(TOPOLOGIES)}")
    if op is not None and op not in CASES:
        raise typer.BadParameter(f"{op} is none of {', '.join(CASES)}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip, so nothing to lock
    rows: list[Row] = []
    try:
        share = (
            None
            if model is None
            else share_of(
                model,
                topology,
                layers=layers,
                chips=chips,
                heads_over=heads_over,
                draft=draft,
                requests=requests,
                context=context,
            )
        )
        document = about(topology)
    except UserError as error:
        raise typer.BadParameter(str(error)) from None
    if model is not None and share is not None:
        rows.append(step_row(model, share, topology))
    else:
        for operation, name, each in _chosen(op, case):
            rows.append(compiled_row(operation, name, each, topology))
            save(document | {"rows": rows}, json)
    CONSOLE.print(table(rows, f"compiled for {topology}, never run; times are a model's"))
    write(document | {"rows": rows}, json)
    if any("reason" in row["detail"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
