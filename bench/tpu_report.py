"""What results of `bench.tpu_aot` say: memory and cost by the compiler, time by a model."""

import importlib.metadata
from typing import Any

import jax
from rich.table import Table

from bench.kernels import CONSOLE, Row
from bench.record import environment
from bench.roofline import Bound
from bench.tpu_step import TOPOLOGIES, TpuProgram
from bench.work import WrongResultError
from dhisparse_jax.engine.rates import Floors
from dhisparse_jax.errors import UserError

PUBLISHED = {
    "v5e": Floors(hbm_gbps=819, h2d_gbps=16, bf16_tflops=197, launch_us=0),
    "v6e": Floors(hbm_gbps=1640, h2d_gbps=32, bf16_tflops=918, launch_us=0),
}
"""Google Cloud's documents on TPU v5e and v6e. The link (h2d) is assumed: PCIe, 16 lanes of the
third and fourth generation."""

RATES = "published, and an assumed host link; nothing is measured"

REFUSED = (NotImplementedError, WrongResultError, jax.errors.JaxRuntimeError)
"""What says that a case does not compile; any other exception is a fault of the benchmark."""


def first_line(reason: Exception) -> str:
    """Of what a case was refused for."""
    lines = str(reason).strip().splitlines() or [""]
    return f"{type(reason).__name__}: {lines[0]}"


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


def check_in_place(memory: dict[str, int], pool_bytes: int, updated: int) -> None:
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


def tell(row: Row, detail: dict[str, Any], least: Bound) -> None:
    """A row, as soon as there is one."""
    said = detail.get("reason") or f"compiled in {detail['compile_s']} s"
    text = f"{row['op']} {row['case']}: {least.name} {least.us:.0f} us by the model; {said}"
    CONSOLE.print(text, highlight=False)


def table(rows: list[Row], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title)
    for name in ("operation", "case", "bound"):
        out.add_column(name)
    for name in ("model us", "HBM MB", "link MB", "copies"):
        out.add_column(name, justify="right")
    for name in ("operands MB", "on host MB", "temporary MB", "code KB", "compile s"):
        out.add_column(name, justify="right")
    for row in rows:
        detail, model = row["detail"], row["detail"]["model"]
        cells = [row["op"], row["case"], row["bound"], f"{row['floor_us']:.0f}"]
        cells += [f"{model[kind] / 1e6:.1f}" for kind in ("hbm_bytes", "link_bytes")]
        cells.append(str(model["copies"]))
        if "reason" in detail:
            out.add_row(*cells, "", "", "", "", "refused")
            continue
        memory = detail["memory"]
        out.add_row(
            *cells,
            f"{memory['argument_bytes'] / 1e6:.1f}",
            f"{memory['host_argument_bytes'] / 1e6:.1f}",
            f"{memory['temporary_bytes'] / 1e6:.2f}",
            f"{memory['code_bytes'] / 1e3:.0f}",
            f"{detail['compile_s']:.1f}",
        )
    return out


def about(topology: str) -> dict[str, Any]:
    """Where the result is from, and what its figures rest on.

    Raises:
        UserError: libtpu is not installed.
    """
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("libtpu is not installed: pip install -e '.[tpu]'") from None
    return {
        "bench": "tpu_aot",
        **environment(),
        "device": f"{topology}, described by libtpu; there is no TPU",
        "libtpu": version,
        "rates": {"are": RATES, **PUBLISHED[TOPOLOGIES[topology]]._asdict()},
    }
