"""The TPU kernels at production sizes, compiled ahead of time: nothing here runs on a TPU.

    python -m bench.tpu_aot --topology v5e:2x2 --json bench/results/tpu/kernels_v5e.json
    python -m bench.tpu_aot --topology v6e:2x2 --op sparse_attention
    python -m bench.tpu_aot --topology v6e:2x2 --model glm-5.3 --json step_v6e.json

libtpu (`pip install 'dhisparse-jax[tpu]'`) is the compiler of a TPU and needs none. For every case
the result has what the compiler says of memory and cost, and beside it a model: the bytes that the
kernel moves by design over published rates. No row has a measured time.

With `--model` it is the whole decode step of one chip's share (`bench.shard_model`): attention
whole, the routed experts shared with the other chips; all layers, since groups of one kind share a
program (`bench.shard_segments`). The model of its traffic is its weights once, the index keys once
and the rows of every query; what is fetched depends on the text. Whatever is donated has to be
updated in place, host pools above all, or the command fails.

The compiler's costs are those of XLA around the kernels and of what the kernels declare; it does
not look into them. The rate of the host link is not published, so that is an assumption.
"""

import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.table import Table

from bench.kernels import CONSOLE, Row
from bench.record import environment, save, write
from bench.roofline import Bound, Traffic, bound
from bench.shard_cells import Cell
from bench.shard_memory import account, tree_bytes
from bench.shard_setup import Setup, abstract_setup
from bench.tpu_cases import CASES, TpuCase
from bench.tpu_step import TOPOLOGIES, TpuProgram, compile_for_tpu, compile_tpu_step
from bench.work import WrongResultError
from dhisparse_jax.config import Policy
from dhisparse_jax.engine.rates import Floors
from dhisparse_jax.models.glm.memory import FIXED_ROWS
from pallas_kernels.common.interpret import ahead_of_time
from pallas_kernels.common.rows import WORD_BYTES

PUBLISHED = {
    "v5e": Floors(hbm_gbps=819, h2d_gbps=16, bf16_tflops=197, launch_us=0),
    "v6e": Floors(hbm_gbps=1640, h2d_gbps=32, bf16_tflops=918, launch_us=0),
}
"""Google Cloud's documents on TPU v5e and v6e. The link (h2d) is assumed: PCIe, 16 lanes of the
third and fourth generation."""

RATES = "published, and an assumed host link; nothing is measured"

REFUSED = (NotImplementedError, WrongResultError, jax.errors.JaxRuntimeError)
"""What says that a case does not compile; any other exception is a fault of the benchmark."""


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
            _check_in_place(detail["memory"], program.pool_bytes, tree_bytes(case.operands[0]))
    except REFUSED as reason:
        detail["reason"] = _first_line(reason)
    _tell(row, detail, least)
    return {**row, "ratio": None, "bound": least.name, "detail": detail}


def _first_line(reason: Exception) -> str:
    lines = str(reason).strip().splitlines() or [""]
    return f"{type(reason).__name__}: {lines[0]}"


def step_row(name: str, setup: Setup, cell: Cell, topology: str) -> Row:
    """Compile a decode step, and say what the compiler and the model say."""
    with ahead_of_time(TOPOLOGIES[topology]):
        traffic = _step_traffic(setup, cell)
    least = bound(traffic, PUBLISHED[TOPOLOGIES[topology]])
    layers = setup.model.config.num_layers
    row: Row = {"op": "decode_step", "case": f"{name}_{layers}_layers", "time_us": None}
    row |= {"floor_us": least.us, "ratio": None, "bound": least.name}
    detail: dict[str, Any] = {"backend": "tpu", "model": {**traffic._asdict(), "copies": 0}}
    detail["sizes"] = {
        "policy": cell.policy.value,
        "requests": cell.requests,
        "queries": setup.drafter.length + 1,
        "positions": setup.capacity,
        "hot_rows": cell.hot_rows,
        "experts_per_layer": setup.model.experts,
    }
    try:
        programs = compile_tpu_step(setup, cell, topology)
        said = {each: said_of(program) for each, program in programs.items()}
        detail |= {"programs": said, "memory": _together(said)}
        detail["compile_s"] = sum(each["compile_s"] for each in said.values())
        for each, program in programs.items():
            if program.pool_bytes:
                _check_in_place(said[each]["memory"], program.pool_bytes, program.pool_bytes)
    except REFUSED as reason:
        detail["reason"] = _first_line(reason)
    _tell(row, detail, least)
    return {**row, "detail": detail}


def _together(said: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The most that a program needs beside its operands, and the code of all."""
    memory = [each["memory"] for each in said.values()]
    most = {
        kind: max(each[kind] for each in memory)
        for kind in ("temporary_bytes", "host_temporary_bytes")
    }
    return most | {"code_bytes": sum(each["code_bytes"] for each in memory)}


def _step_traffic(setup: Setup, cell: Cell) -> Traffic:
    """Weights but for the embedding, index keys, and the lines of what every query selects."""
    held = account(setup, cell).bytes
    state = ("embedding", "hot records", "tails", "staging", "tables", "workspace", "replayed")
    read = sum(size for kind, size in held.items() if kind not in state)
    cfg, config = setup.config(cell), setup.model.config
    row = WORD_BYTES * cfg.record_layout.row_stride(cfg.geometry.row.words)
    queries = cell.requests * (setup.drafter.length + 1)
    return Traffic(hbm_bytes=read + queries * config.num_layers * config.index_top_k * row)


def said_of(program: TpuProgram) -> dict[str, Any]:
    """What the compiler says of memory and of cost, and how long it took."""
    stats, cost = program.compiled.memory_analysis(), program.compiled.cost_analysis() or {}
    device = {
        f"{kind}_bytes": getattr(stats, f"{name}_size_in_bytes")
        for kind, name in (
            ("argument", "argument"),
            ("output", "output"),
            ("aliased", "alias"),
            ("temporary", "temp"),
            ("code", "generated_code"),
        )
    }
    host = {
        f"host_{kind}_bytes": getattr(stats, f"host_{name}_size_in_bytes")
        for kind, name in (("argument", "argument"), ("aliased", "alias"), ("temporary", "temp"))
    }
    return {
        "compile_s": round(program.seconds, 2),
        "memory": device | host,
        "compiler": {
            "flops": cost.get("flops"),
            "bytes": cost.get("bytes accessed"),
            "us": 1e6 * seconds if (seconds := cost.get("optimal_seconds", 0.0)) > 0 else None,
        },
    }


def _check_in_place(memory: dict[str, int], pool_bytes: int, updated: int) -> None:
    """Whether so many bytes are updated where they are, and no host pool is copied anywhere.

    Raises:
        WrongResultError: it is not so.
    """
    aliased = memory["aliased_bytes"] + memory["host_aliased_bytes"]
    temporary = memory["temporary_bytes"]
    if memory["host_temporary_bytes"] or temporary > pool_bytes // 10 or aliased < updated:
        raise WrongResultError(
            f"{aliased} of {updated} bytes are updated in place; temporary are {temporary} on the "
            f"device and {memory['host_temporary_bytes']} on the host"
        )


def _tell(row: Row, detail: dict[str, Any], least: Bound) -> None:
    said = detail.get("reason") or f"compiled in {detail['compile_s']} s"
    text = f"{row['op']} {row['case']}: {least.name} {least.us:.0f} us by the model; {said}"
    CONSOLE.print(text, highlight=False)


def table(rows: list[Row], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title)
    for name in ("operation", "case", "bound"):
        out.add_column(name)
    for name in ("model us", "HBM MB", "link MB", "copies", "temporary MB", "code KB", "compile s"):
        out.add_column(name, justify="right")
    for row in rows:
        detail, model = row["detail"], row["detail"]["model"]
        cells = [row["op"], row["case"], row["bound"], f"{row['floor_us']:.0f}"]
        cells += [f"{model[kind] / 1e6:.1f}" for kind in ("hbm_bytes", "link_bytes")]
        cells.append(str(model["copies"]))
        if "reason" in detail:
            out.add_row(*cells, "", "", "refused")
            continue
        memory = detail["memory"]
        out.add_row(
            *cells,
            f"{memory['temporary_bytes'] / 1e6:.2f}",
            f"{memory['code_bytes'] / 1e3:.0f}",
            f"{detail['compile_s']:.1f}",
        )
    return out


def about(topology: str) -> dict[str, Any]:
    """Where the result is from, and what its figures rest on."""
    return {
        "bench": "tpu_aot",
        **environment(),
        "device": f"{topology}, described by libtpu; there is no TPU",
        "libtpu": importlib.metadata.version("libtpu"),
        "rates": {"are": RATES, **PUBLISHED[TOPOLOGIES[topology]]._asdict()},
    }


def _chosen(op: str | None, case: str) -> Iterator[tuple[str, str, TpuCase]]:
    """Cases of one operation, or all, whose names match."""
    for operation in [op] if op else CASES:
        for name, each in CASES[operation].items():
            if re.search(case, name):
                yield operation, name, each


def _share(
    model: str, layers: int | None, chips: int, draft: str, requests: int, context: int
) -> tuple[Setup, Cell]:
    """One chip's share of a model, and its load: adaptive, with the slots of `fixed`."""
    setup = abstract_setup(
        model,
        layers=layers,
        context=context,
        room=64,
        draft=draft,
        requests=requests,
        traces=requests,
        gpus=chips,
    )
    hot_rows = FIXED_ROWS * setup.model.config.index_top_k
    return setup, Cell(
        name="adaptive",
        policy=Policy.ADAPTIVE,
        draft=draft,
        requests=requests,
        hot_rows=hot_rows,
    )


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
    chips: Annotated[int, typer.Option(help="Chips that share its experts.")] = 256,
    draft: Annotated[str, typer.Option(help="dflash2, dspark or none.")] = "none",
    requests: Annotated[int, typer.Option(help="Requests on the chip.")] = 2,
    context: Annotated[int, typer.Option(help="Positions of each.")] = 100_000,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Compile the TPU kernels, or a decode step, for a TPU that is not there."""
    if topology not in TOPOLOGIES:
        raise typer.BadParameter(f"{topology} is none of {', '.join(TOPOLOGIES)}")
    if op is not None and op not in CASES:
        raise typer.BadParameter(f"{op} is none of {', '.join(CASES)}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip, so nothing to lock
    document = about(topology)
    rows: list[Row] = []
    if model is not None:
        with ahead_of_time(TOPOLOGIES[topology]):
            setup, cell = _share(model, layers, chips, draft, requests, context)
        rows.append(step_row(model, setup, cell, topology))
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
