"""Variants of the top-K and plan kernels on one GPU: `python -m bench.tune_select [--profile]`.

Every variant is compared with the exact reference at the size at which it is timed, before it is
timed. What fails becomes a row with its reason. The defaults come first, then the sweep, until the
time that was allowed is used up: what is left is said, not measured.

With `--profile` the last thing is the time of every kernel of the largest plan, from a trace.
"""

import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from bench.ops.plan import Operands, Plan
from bench.record import environment, write
from bench.roofline import Traffic, bound, measure_floors
from bench.scores import DISTRIBUTIONS, FEW_ROWS, SMALL_TOP_K, TOP_K_SIZES, TopKSize, normal
from bench.timing import chain, measure
from bench.work import WrongResultError
from pallas_kernels.plan import reference as plan_reference
from pallas_kernels.plan import triton as plan_triton
from pallas_kernels.plan.types import PlanResult, PlanTables
from pallas_kernels.top_k import reference as top_k_reference
from pallas_kernels.top_k import triton as top_k_triton

CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 140)

PLAN_CALLS, TOP_K_CALLS = 4, 4
"""Steps and inputs of a chain. More of them change the times little and take long to compile."""

PAGE_SLOTS = 16


class Trial(NamedTuple):
    """One time to find.

    Attributes:
        name: operation, case and variant.
        traffic: what one call has to move.
        check: raises WrongResultError if the variant is wrong.
        run: median microseconds of a call.
    """

    name: tuple[str, str, str]
    traffic: Traffic
    check: Callable[[], None]
    run: Callable[[], float]


INTERPRET = jax.default_backend() == "cpu"
"""Where there is no GPU the script can be tried, with --small; its times mean nothing there."""


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
        _equal(jax.jit(run)(given), exact)

    def timed() -> float:
        step = lambda state, operands, call: (state, run(operands[call]))
        given = scores(TOP_K_CALLS)
        return measure(step, (), given, calls=TOP_K_CALLS)[0].median

    moved = 4 * size.rows * (size.positions + size.k)
    name = ("top_k", f"{size.name}{draw.__name__}", variant)
    return Trial(name, Traffic(hbm_bytes=moved), check, timed)


# Plan


PLANS = {
    "128_requests_T8": Plan(requests=128, queries=8, budget=4, calls=PLAN_CALLS),
    "16_requests_T8": Plan(requests=16, queries=8, budget=4, calls=PLAN_CALLS),
    "16_requests_T8_14K": Plan(requests=16, queries=8, budget=14, calls=PLAN_CALLS),
    "128_requests_T1": Plan(requests=128, queries=1, budget=2, calls=PLAN_CALLS),
    "16_requests_T1": Plan(requests=16, queries=1, budget=2, calls=PLAN_CALLS),
}

PLAN_VARIANTS = {
    "block 2048 warps 8": plan_triton.Tuning(block=2048, warps=8),
    "block 512": plan_triton.Tuning(block=512),
    "warps 8": plan_triton.Tuning(warps=8),
    "slots 4096": plan_triton.Tuning(slots=4096),
    "slots 8192": plan_triton.Tuning(slots=8192),
    "8 victim warps": plan_triton.Tuning(victim_warps=8),
}


class _PlanCase:
    """Operands of a plan and what the reference makes of them, made when they are asked for."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self.plan = name, plan

    @functools.cached_property
    def work(self) -> Any:  # noqa: ANN401
        """The operands and the traffic."""
        return self.plan.build("reference")

    @functools.cached_property
    def expected(self) -> Any:  # noqa: ANN401
        """What the reference plans, step by step, and the tables in the end."""
        return self.results(plan_reference.plan)

    def results(self, plan: Callable[..., Any]) -> Any:  # noqa: ANN401
        """Tables after a chain of `plan`, and its results."""
        tables, _ = operands = self.work.operands
        return chain(_plan_step(plan), PLAN_CALLS)(jax.tree.map(jnp.copy, tables), operands)

    def trial(self, variant: str, tuning: plan_triton.Tuning) -> Trial:
        """Check and time of one variant."""
        plan = functools.partial(plan_triton.plan, tuning=tuning, interpret=INTERPRET)

        def timed() -> float:
            state = jax.tree.map(jnp.copy, self.work.operands[0])
            step = _plan_step(plan)
            return measure(step, state, self.work.operands, calls=PLAN_CALLS)[0].median

        check = lambda: _equal(self.results(plan), self.expected)
        return Trial(("plan", self.name, variant), self.work.traffic, check, timed)


def _plan_step(plan: Callable[..., Any]) -> Any:  # noqa: ANN401
    def step(tables: PlanTables, operands: Operands, call: int) -> tuple[PlanTables, PlanResult]:
        first, steps = operands
        result, tables = plan(steps[call], tables if call else first, page_slots=PAGE_SLOTS)
        return tables, result

    return step


# Running


def _equal(found: Any, exact: Any) -> None:  # noqa: ANN401
    """Compare every entry, on the device.

    Raises:
        WrongResultError: with the first leaf that differs.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(exact), strict=True)
    for (path, leaf), wanted in pairs:
        if not bool(jnp.array_equal(leaf, wanted)):
            where = jnp.argwhere(leaf != wanted, size=1)[0].tolist()
            count = int(jnp.sum(leaf != wanted))
            name = jax.tree_util.keystr(path)
            raise WrongResultError(f"{name} differs in {count} entries, first at {where}")


def _trials(cases: list[_PlanCase], sizes: tuple[TopKSize, ...], few: TopKSize) -> Iterator[Trial]:
    """The defaults, the hard inputs, then the sweep; lazily, since each allocates its operands."""
    default = lambda size: top_k_triton.tuning(size.k)
    for size in (*sizes, few):
        yield _top_k_trial(size, "default", default(size))
    for case in cases:
        yield case.trial("default", plan_triton.Tuning())
    for draw in DISTRIBUTIONS[1:]:
        yield _top_k_trial(sizes[0], "default", default(sizes[0]), draw)
    for size in sizes:
        for variant, tuning in _variants_of_top_k(size.k).items():
            yield _top_k_trial(size, variant, tuning)
    for variant, plan_tuning in PLAN_VARIANTS.items():
        for case in cases[:2]:
            yield case.trial(variant, plan_tuning)


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


def _kernel_times(case: _PlanCase) -> dict[str, float]:
    """Microseconds per step of every kernel of the default plan, from a profiler's trace."""
    plan = functools.partial(plan_triton.plan, interpret=INTERPRET)
    case.results(plan)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(case.results(plan))
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        times: dict[str, float] = defaultdict(float)
        for plane in data.planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        times[event.name] += event.duration_ns / 1e3 / PLAN_CALLS
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def main(
    seconds: Annotated[float, typer.Option(help="Start no trial after so long.")] = 85,
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
    cases = [
        _PlanCase(name, Plan(**{**vars(plan), "calls": PLAN_CALLS})) for name, plan in plans.items()
    ]
    sizes = (SMALL_TOP_K,) if small else TOP_K_SIZES
    rows = []
    for trial in _trials(cases, sizes, SMALL_TOP_K if small else FEW_ROWS):
        if time.perf_counter() - begin > seconds:
            CONSOLE.print(f"{seconds} s are over before {trial.name}", highlight=False)
            break
        rows.append(_row(trial, floors))
        spent = time.perf_counter() - begin
        CONSOLE.print(f"{spent:5.1f} s {rows[-1]}", highlight=False)
    CONSOLE.print(_table(rows))
    result = {"bench": "tune_select", **environment(), "floors": floors._asdict(), "rows": rows}
    if profile:
        try:
            result["kernels_us"] = _kernel_times(cases[0])
        except Exception as error:
            result["kernels_us"] = {f"{type(error).__name__}: {error}": 0.0}
        for name, us in list(result["kernels_us"].items())[:20]:
            CONSOLE.print(f"{us:8.1f} us  {name[:100]}", highlight=False)
    write(result, json)


if __name__ == "__main__":
    typer.run(main)
