"""Variants of the plan and top-K kernels on one GPU: `python -m bench.tune_select [--op NAME]`.

Every variant is compared with the exact reference at the size at which it is timed, before it is
timed. What fails becomes a row with its reason. Of each operation the defaults come first, then the
sweep, until the time that was allowed is used up: what is left is said, not measured.

With `--profile` the last thing is the time of every kernel of the two largest plans, from a trace.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from bench.plan_variants import PLANS, PlanCase, kernel_times, plan_trials
from bench.record import environment, write
from bench.roofline import Traffic, bound
from bench.scores import DISTRIBUTIONS, FEW_ROWS, SMALL_TOP_K, TOP_K_SIZES, TopKSize, normal
from bench.trials import INTERPRET, Trial, equal
from dhisparse_jax.engine.rates import measure_floors
from dhisparse_jax.engine.timing import measure
from pallas_kernels.top_k import reference as top_k_reference
from pallas_kernels.top_k import triton as top_k_triton

CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 140)

TOP_K_CALLS = 4
"""Inputs of a chain. More of them change the times little and take long to compile."""

Operation = Literal["plan", "top_k"]


# Top-K


def _variants_of_top_k(k: int) -> dict[str, top_k_triton.Tuning]:
    """The default, then what may be better, the likeliest first."""
    room = top_k_triton.tuning(k).candidates
    sizes = functools.partial(top_k_triton.Tuning, candidates=room)
    block = top_k_triton.tuning(k).block
    return {
        f"block {block} unroll 2": sizes(block=block, unroll=2),
        f"block {block} unroll 2 warps 32": sizes(block=block, unroll=2, warps=32),
        f"block {2 * block} unroll 1": sizes(block=2 * block, unroll=1),
        f"block {2 * block} unroll 2 warps 32": sizes(block=2 * block, unroll=2, warps=32),
        f"block {block} warps 8": sizes(block=block, warps=8),
        f"block {block // 2}": sizes(block=block // 2),
        "choose with 16 warps": sizes(block=block, choose_warps=16),
        "half the candidates": sizes(block=block, candidates=max(room // 2, k)),
    }


def _top_k_trial(
    size: TopKSize,
    variant: str,
    tuning: top_k_triton.Tuning,
    draw: Callable[[Array, tuple[int, ...]], Array] = normal,
) -> Trial:
    run = functools.partial(top_k_triton.top_k, k=size.k, sizes=tuning, interpret=INTERPRET)

    def scores(calls: int) -> list[Array]:
        shape = (size.rows, 1, size.positions)
        return [draw(key, shape) for key in jax.random.split(jax.random.key(0), calls)]

    def check() -> None:
        given = scores(1)[0]
        exact = jax.jit(functools.partial(top_k_reference.top_k, k=size.k))(given)
        equal(jax.jit(run)(given), exact)

    def timed() -> float:
        step = lambda state, operands, call: (state, run(operands[call]))
        given = scores(TOP_K_CALLS)
        return measure(step, (), given, calls=TOP_K_CALLS)[0].median

    moved = 4 * size.rows * (size.positions + size.k)
    name = ("top_k", f"{size.name}{draw.__name__}", variant)
    return Trial(name, Traffic(hbm_bytes=moved), check, timed)


# Running


def _top_k_trials(sizes: tuple[TopKSize, ...], few: TopKSize) -> Iterator[Trial]:
    """The defaults, the hard inputs, then the sweep; lazily, since each allocates its operands."""
    default = lambda size: top_k_triton.tuning(size.k)
    for size in (*sizes, few):
        yield _top_k_trial(size, "default", default(size))
    for draw in DISTRIBUTIONS[1:]:
        yield _top_k_trial(sizes[0], "default", default(sizes[0]), draw)
    for size in sizes:
        for variant, tuning in _variants_of_top_k(size.k).items():
            yield _top_k_trial(size, variant, tuning)


def _row(trial: Trial, floors: Any) -> dict[str, Any]:  # noqa: ANN401
    """Check and time a trial. Whatever goes wrong is its row: the others must still run."""
    least = bound(trial.traffic, floors)
    row: dict[str, Any] = dict(zip(("op", "case", "variant"), trial.name, strict=True))
    row |= {"time_us": None, "floor_us": least.us, "ratio": None, "bound": least.name}
    try:
        trial.check()
        row["time_us"] = trial.run()
        row["ratio"] = row["time_us"] / least.us
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        row["reason"] = f"{type(error).__name__}: {lines[0][:160]}"
    return row


def _line(row: dict[str, Any]) -> str:
    """A row while others are still to come."""
    found = row["reason"] if row["time_us"] is None else f"{row['time_us']:.1f} us"
    return f"{row['op']}, {row['case']}, {row['variant']}: {found}"


def _table(rows: list[dict[str, Any]]) -> Table:
    out = Table(title="time of one call, median")
    for name in ("operation", "case", "variant"):
        out.add_column(name)
    for name in ("floor us", "time us", "ratio"):
        out.add_column(name, justify="right")
    for row in rows:
        cells = [row["op"], row["case"], row["variant"], f"{row['floor_us']:.1f}"]
        if row["time_us"] is None:
            out.add_row(*cells, "-", row["reason"])
        else:
            out.add_row(*cells, f"{row['time_us']:.1f}", f"{row['ratio']:.1f}")
    return out


def _profile(cases: list[PlanCase]) -> dict[str, dict[str, float]]:
    """Microseconds of the kernels of each case; or why there are none."""
    try:
        found = {case.name: kernel_times(case) for case in cases}
    except Exception as error:
        found = {f"{type(error).__name__}: {error}": dict[str, float]()}
    for case, times in found.items():
        CONSOLE.print(f"kernels of {case}", highlight=False)
        for name, us in list(times.items())[:20]:
            CONSOLE.print(f"{us:8.1f} us  {name[:100]}", highlight=False)
    return found


def main(
    seconds: Annotated[float, typer.Option(help="Start no trial after so long.")] = 85,
    op: Annotated[Operation | None, typer.Option(help="Only this operation.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Sizes for interpret mode.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Kernels of the plan.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Check and time the variants."""
    begin = time.perf_counter()
    copy_bytes, side = (1 << 20, 64) if small else (1 << 29, 1024)
    floors = measure_floors(5, copy_bytes=copy_bytes, side=side)
    CONSOLE.print(f"floors: {floors}", highlight=False)
    plans = {name: plan.small() if small else plan for name, plan in PLANS.items()}
    cases = [PlanCase(name, plan) for name, plan in plans.items()]
    sizes, few = ((SMALL_TOP_K,), SMALL_TOP_K) if small else (TOP_K_SIZES, FEW_ROWS)
    trials = {"plan": plan_trials(cases), "top_k": _top_k_trials(sizes, few)}
    rows = []
    for trial in itertools.chain(*([trials[op]] if op else trials.values())):
        if time.perf_counter() - begin > seconds:
            CONSOLE.print(f"{seconds} s are over before {trial.name}", highlight=False)
            break
        rows.append(_row(trial, floors))
        spent = time.perf_counter() - begin
        CONSOLE.print(f"{spent:5.1f} s  {_line(rows[-1])}", highlight=False, soft_wrap=True)
    CONSOLE.print(_table(rows))
    result = {"bench": "tune_select", **environment(), "floors": floors._asdict(), "rows": rows}
    if profile:
        result["kernels_us"] = _profile(cases[:2])
    write(result, json)


if __name__ == "__main__":
    typer.run(main)
