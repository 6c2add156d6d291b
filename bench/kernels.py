"""Every operation against its floor: `python -m bench.kernels [--op NAME] [--json OUT]`.

Cases are the production sizes in `bench/ops` and the shared ones of `pallas_kernels/*/cases.py`.
The backend of each is the one that the library would choose, or the one that is asked for; it is
printed, and never replaced by another. The floor (`bench.roofline`) is printed before the
measurement. A case that the device or the operation does not support gets a reason, not a number.

The large pools take 24 GiB of pinned memory: XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB must allow it.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.ops import (
    backup,
    draft_attention,
    index_scores,
    packed_products,
    plan,
    retrieve,
    retrieve_attend,
    sparse_attention,
    top_k,
)
from bench.ops.copies import CopySizes
from bench.record import environment, save, write
from bench.roofline import Bound, Traffic, bound
from bench.work import AnyWork, Case, WrongResultError
from dhisparse_jax.engine.rates import CPU_FLOORS, Floors, measure_floors
from dhisparse_jax.engine.timing import RUNS, Timing, measure
from pallas_kernels.common.backends import Backend, default_backend

OPERATIONS: dict[str, Any] = {
    "retrieve": retrieve,
    "backup": backup,
    "plan": plan,
    "index_scores": index_scores,
    "top_k": top_k,
    "sparse_attention": sparse_attention,
    "retrieve_attend": retrieve_attend,
    "packed_products": packed_products,
    "draft_attention": draft_attention,
}

CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 140)

Row = dict[str, Any]

REFUSED = (NotImplementedError, ValueError, WrongResultError, jax.errors.JaxRuntimeError)
"""What says that a case cannot be measured; any other exception is a fault of the benchmark."""


class Job(NamedTuple):
    """A case that is about to run.

    Attributes:
        operation: name of the operation.
        case: name of the case.
        build: allocates its operands.
        pools: sizes of its large host pools; jobs with the same ones follow each other.
    """

    operation: str
    case: str
    build: Callable[[Backend], AnyWork]
    pools: tuple[int, ...] = ()


def production(operation: str, cases: Mapping[str, Case], *, small: bool) -> Iterator[Job]:
    """Jobs of production sizes, scaled down if `small`."""
    for name, case in cases.items():
        sized = case.small() if small else case
        build = sized.build if small else lambda backend, case=case: _fitting(case).build(backend)
        yield Job(operation, name, build, _pools(case))


def _pools(case: Case) -> tuple[int, ...]:
    """Sizes of the host pools of a case that copies records: pinning them again takes long."""
    sizes = getattr(case, "sizes", None)
    if not isinstance(sizes, CopySizes):
        return ()
    return sizes.words, sizes.pools, sizes.pool_bytes


def _fitting(case: Case) -> Case:
    """The case, if this machine can hold it.

    Raises:
        NotImplementedError: with the reason.
    """
    if jax.default_backend() == "cpu":
        raise NotImplementedError("a production size; --small runs it on a CPU")
    host, device = case.memory()
    if host > 0.8 * psutil.virtual_memory().total:
        raise NotImplementedError(f"needs {host / 1e9:.0f} GB of host memory")
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", device)
    if device > limit:
        raise NotImplementedError(f"needs about {device / 1e9:.0f} GB of device memory")
    return case


def shared(operation: str, *, every: bool) -> Iterator[Job]:
    """Jobs of the cases that tests use too: those with the shapes of GLM, or all."""
    module = f"pallas_kernels.{operation}.cases"
    if importlib.util.find_spec(module) is None:
        return
    for name, make in importlib.import_module(module).CASES.items():
        if every or name.startswith("glm"):
            build = lambda backend, make=make: OPERATIONS[operation].shared(make(), backend)
            yield Job(operation, f"shared_{name}", build)


def run(job: Job, floors: Floors, backend: Backend | None = None, runs: int = RUNS) -> Row:
    """State the bound of a case, measure it, and return its row."""
    row: Row = {"op": job.operation, "case": job.case}
    row |= dict.fromkeys(("time_us", "floor_us", "ratio", "bound"))
    detail: dict[str, Any] = {}
    try:
        detail["backend"] = backend or default_backend(job.operation)
        work = job.build(detail["backend"])
        least = bound(work.traffic, floors)
        row |= {"floor_us": least.us, "bound": least.name}
        CONSOLE.print(_statement(job, detail["backend"], work.traffic, least), highlight=False)
        timing, state, results = measure(
            work.step, work.state, work.operands, calls=work.calls, runs=runs, anew=work.anew
        )
        found = work.inspect(state, results) if work.inspect else {}
        detail |= {**work.detail, **found, **_speed(work.traffic, floors, timing)}
        detail |= _parts(work, state, timing, runs)
        row |= {"time_us": timing.median, "ratio": timing.median / least.us}
    except REFUSED as reason:
        lines = str(reason).strip().splitlines() or [""]
        detail["reason"] = f"{type(reason).__name__}: {lines[0]}"
        CONSOLE.print(f"{job.operation} {job.case}: {detail['reason']}", highlight=False)
    return {**row, "detail": detail}


def _statement(job: Job, backend: Backend, traffic: Traffic, least: Bound) -> str:
    parts = [
        f"{traffic.link_bytes / 1e6:.3g} MB over the link" if traffic.link_bytes else "",
        f"{traffic.hbm_bytes / 1e6:.3g} MB in device memory" if traffic.hbm_bytes else "",
        f"{traffic.flops / 1e9:.3g} GFLOP" if traffic.flops else "",
    ]
    moved = ", ".join(part for part in parts if part)
    return f"{job.operation} {job.case} ({backend}): {moved}; {least.name} {least.us:.1f} us"


def _speed(traffic: Traffic, floors: Floors, timing: Timing) -> dict[str, Any]:
    """Spread of the times, time beyond bytes and flops, bytes per second (link before memory)."""
    moved = traffic.link_bytes or traffic.hbm_bytes
    no_launch = bound(traffic, floors._replace(launch_us=0)).us
    return {
        "beyond_bytes_us": timing.median - no_launch,
        "spread_us": [timing.low, timing.high],
        "runs": timing.runs,
        "calls_per_run": timing.calls,
        "gbps": moved / timing.median / 1e3,
    }


def _parts(work: AnyWork, state: Any, together: Timing, runs: int) -> dict[str, float]:  # noqa: ANN401
    """Time of each part alone, and that of the whole in units of the longest."""
    times: dict[str, float] = {}
    for name, step in work.parts.items():
        alone, state, _ = measure(step, state, work.operands, calls=work.calls, runs=runs)
        times[f"{name}_us"] = alone.median
    if not times:
        return {}
    return {**times, "together_over_longer": together.median / max(times.values())}


def table(rows: list[Row], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title)
    for name in ("operation", "case", "backend", "bound"):
        out.add_column(name)
    for name in ("floor us", "time us", "quartiles", "GB/s", "of floor"):
        out.add_column(name, justify="right")
    for row in rows:
        detail = row["detail"]
        cells = [row["op"], row["case"], detail.get("backend", ""), row["bound"] or ""]
        if row["time_us"] is None:
            out.add_row(*cells, "", "not run")
            continue
        low, high = detail["spread_us"]
        times = f"{row['floor_us']:.1f}", f"{row['time_us']:.1f}", f"{low:.1f} - {high:.1f}"
        out.add_row(*cells, *times, f"{detail['gbps']:.1f}", f"{1 / row['ratio']:.0%}")
    return out


def floors_for(runs: int, *, small: bool) -> Floors:
    """Measure the floors, with arrays that a CPU copies in milliseconds if `small`."""
    sizes = CPU_FLOORS if small else {}
    floors = measure_floors(runs, **sizes)
    rates = ", ".join(f"{name} {value:.4g}" for name, value in floors._asdict().items())
    CONSOLE.print(f"floors: {rates}", highlight=False)
    return floors


def report(
    bench: str, floors: Floors, rows: Iterable[Row], json: Path | None, **facts: object
) -> None:
    """Measure, print the table, write the result, and fail if an operation did the wrong thing.

    Rows are written as they come, so that a run that is stopped keeps what it measured.
    """
    about: dict[str, Any] = {"bench": bench, **environment(), **facts, "floors": floors._asdict()}
    done: list[Row] = []
    for row in rows:
        done.append(row)
        save(about | {"rows": done}, json)
    CONSOLE.print(table(done, "time of one call, median"))
    write(about | {"rows": done}, json)
    wrong = [row for row in done if WrongResultError.__name__ in row["detail"].get("reason", "")]
    if wrong:
        raise typer.Exit(1)


def main(
    op: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    case: Annotated[
        str, typer.Option(help="Only cases whose name has a match of this regex.")
    ] = "",
    backend: Annotated[Backend | None, typer.Option(help="Instead of the default.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Sizes for a CPU.")] = False,
    every: Annotated[
        bool, typer.Option("--every", help="All shared cases, corner ones too.")
    ] = False,
    runs: Annotated[int, typer.Option(help="Timed runs of each case.")] = RUNS,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure the operations against their floors."""
    if op is not None and op not in OPERATIONS:
        raise typer.BadParameter(f"{op} is none of {', '.join(OPERATIONS)}")
    small_floors = small or jax.default_backend() == "cpu"
    floors = floors_for(runs, small=small_floors)
    jobs = [
        job
        for name in ([op] if op else OPERATIONS)
        for source in (
            production(name, OPERATIONS[name].CASES, small=small),
            shared(name, every=every),
        )
        for job in source
        if re.search(case, job.case)
    ]
    jobs.sort(key=lambda job: job.pools)
    rows = (run(job, floors, backend, runs) for job in jobs)
    report("kernels", floors, rows, json, small=small)


if __name__ == "__main__":
    typer.run(main)
