"""Variants of a kernel at production sizes: `python -m bench.tune [--op NAME] [--json OUT]`.

Each variant is checked first, on a small problem with masked entries and poison, against the exact
reference in float32; then timed, and one request of the timed result is checked too. Errors are
relative, in the L2 norm: bf16 operands give 1e-3 to 1e-2, products of bf16 that are summed in
float32 1e-6, float32 operands 1e-6, and tf32, which no variant may use, 3e-4. What does not compile
or is not right has a reason instead of a time. Copies are exact, and a case checks what it copied.
"""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench import variants
from bench.kernels import floors_for
from bench.record import environment, write
from bench.roofline import bound
from bench.variants import Operation, Tree, Variant
from bench.work import AnyWork, WrongResultError
from dhisparse_jax.engine.rates import Floors
from dhisparse_jax.engine.timing import RUNS, chain, measure_chain

CONSOLE = Console(stderr=True, width=140)
WORST = 2e-2
"""A larger error is a wrong result."""

Row = dict[str, Any]
Jobs = tuple[Future[Operation], Future[Operation]]


def error(found: Tree, wanted: Tree) -> float:
    """Largest relative L2 error of the arrays; infinite if -inf is elsewhere, or anything NaN."""
    worst = 0.0
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        ours, exact = (np.asarray(array, np.float64) for array in (mine, right))
        hidden = np.isneginf(exact)
        if (np.isneginf(ours) != hidden).any() or not np.isfinite(ours[~hidden]).all():
            return float("inf")
        difference = np.linalg.norm(ours[~hidden] - exact[~hidden])
        worst = max(worst, float(difference / np.linalg.norm(exact[~hidden])))
    return worst


def small_error(variant: Variant, call: Operation) -> float:
    """Error of the variant, compiled or jitted, on its small problem."""
    wanted = jax.jit(partial(variant.exact, **variant.small_options))(*variant.small)
    return error(call(*variant.prepared(variant.small)), wanted)


def timed_error(variant: Variant, work: AnyWork, state: Tree, results: list[Tree]) -> float:
    """Error of what was timed: as the case itself sees it, or else of one request."""
    if work.inspect is not None:
        try:
            work.inspect(state, results)
        except WrongResultError:
            return float("inf")
        return 0.0
    _, arrays = variant.step(lambda *arrays: arrays)((), work.operands, 0)
    # Slots are those of all requests, and numbers of layers go for all.
    requests = variant.case.requests
    first = lambda array: array[:1] if np.shape(array)[:1] == (requests,) else array
    alone = jax.tree.map(first, arrays)
    wanted = jax.jit(partial(variant.exact, **variant.options))(*alone)
    return error(jax.tree.map(lambda array: array[:1], results[0]), wanted)


def float32_errors(op: str | None, *, small: bool) -> dict[str, float]:
    """Errors on float32 operands, of the operations that compute with them."""
    return {
        name: small_error(variant, jax.jit(partial(variant.call, **variant.small_options)))
        for name, variant in variants.float32(small=small).items()
        if op in (None, name)
    }


def compiling(variant: Variant, work: AnyWork, pool: ThreadPoolExecutor) -> Jobs:
    """The variant on the small problem and at production size, both on their way."""
    check = jax.jit(partial(variant.call, **variant.small_options))
    step = variant.step(partial(variant.call, **variant.options))
    prepared = (
        (lambda given: given)
        if variant.prepare is None
        else partial(jax.eval_shape, variant.prepare)
    )
    whole: Any = chain(step, work.calls)  # a jitted function, which its type does not say
    checked = check.lower(*prepared(variant.small))
    timed = whole.lower(work.state, prepared(work.operands))
    return pool.submit(checked.compile), pool.submit(timed.compile)


def run(variant: Variant, work: AnyWork, jobs: Jobs, floors: Floors) -> tuple[Row, Tree]:
    """Check a variant, time it, check the result that was timed, and hand the state on."""
    least = bound(work.traffic, floors)
    row: Row = {"bound": least.name, "floor_us": least.us}
    check, timed = (job.result() for job in jobs)
    row["error"] = small_error(variant, check)
    operands = variant.prepared(work.operands)
    timing, state, results = measure_chain(timed, work.state, operands, calls=work.calls, runs=RUNS)
    row["timed_error"] = timed_error(variant, work, state, results)
    if not max(row["error"], row["timed_error"]) <= WORST:
        return row | {"reason": "wrong result"}, state
    moved = work.traffic.link_bytes or work.traffic.hbm_bytes
    times = {
        "time_us": timing.median,
        "spread_us": [timing.low, timing.high],
        "gbps": moved / timing.median / 1e3,
        "ratio": timing.median / least.us,
    }
    return row | times, state


def sweep(tried: list[Variant], floors: Floors, pool: ThreadPoolExecutor) -> Iterator[Row]:
    """Rows of all variants, case by case; those of a case are compiled at the same time.

    They take turns with the operands and with the state, which may be too large for a second one.
    """
    for case in dict.fromkeys(variant.case for variant in tried):
        work = case.build("triton")
        group = [variant for variant in tried if variant.case == case]
        jobs = [attempt(compiling, variant, work, pool) for variant in group]
        for variant, job in zip(group, jobs, strict=True):
            done = job if isinstance(job, dict) else attempt(run, variant, work, job, floors)
            if not isinstance(done, dict):
                done, state = done
                work = dataclasses.replace(work, state=state)
            yield {"case": variant.name, "variant": variant.label, **done}


def attempt(action: Callable[..., Tree], *args: object) -> Tree:
    """What the action returns, or the reason as a row: one bad variant must not stop the others."""
    try:
        return action(*args)
    except Exception as reason:
        lines = str(reason).strip().splitlines() or [""]
        return {"reason": f"{type(reason).__name__}: {lines[0][:300]}"}


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    out = Table(title="variants")
    for name in ("operation", "case", "variant"):
        out.add_column(name)
    for name in ("error", "timed", "floor us", "time us", "GB/s", "time / floor"):
        out.add_column(name, justify="right")
    for row in rows:
        errors = [f"{row[name]:.1e}" if name in row else "" for name in ("error", "timed_error")]
        cells = [row["op"], row["case"], row["variant"], *errors]
        if "time_us" not in row:
            out.add_row(*cells, "", row["reason"], "", "")
            continue
        times = f"{row['floor_us']:.1f}", f"{row['time_us']:.1f}", f"{row['gbps']:.0f}"
        out.add_row(*cells, *times, f"{row['ratio']:.2f}")
    return out


def main(
    op: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Interpreted, on a CPU.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Check and time variants of the kernels."""
    if op is not None and op not in variants.VARIANTS:
        raise typer.BadParameter(f"{op} is none of {', '.join(variants.VARIANTS)}")
    floors = floors_for(RUNS, small=small)
    rows: list[Row] = []
    with ThreadPoolExecutor(8) as pool:
        for name in [op] if op else variants.VARIANTS:
            for row in sweep(list(variants.VARIANTS[name](small=small)), floors, pool):
                rows.append({"op": name, **row})
                CONSOLE.print(rows[-1], highlight=False)
    exact = attempt(partial(float32_errors, op, small=small))
    CONSOLE.print(table(rows))
    CONSOLE.print("errors of float32 operands:", exact, highlight=False)
    facts = {"floors": floors._asdict(), "float32_errors": exact, "rows": rows}
    write({"bench": "tune", **environment(), **facts}, json)


if __name__ == "__main__":
    typer.run(main)
