"""Plans that a sweep checks and times, and the variants of their kernels."""

import dataclasses
import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.ops.plan import Operands, Plan
from bench.timing import Chain, chain, measure_chain
from bench.trials import INTERPRET, Trial, equal
from pallas_kernels.plan import reference as plan_reference
from pallas_kernels.plan import triton as plan_triton
from pallas_kernels.plan.types import PlanResult, PlanTables

PLAN_CALLS = 4
"""Steps of a chain. More of them change the times little and take long to compile."""

PAGE_SLOTS = 16

PLANS = {
    "128_requests_T8": Plan(requests=128, queries=8, budget=4, calls=PLAN_CALLS),
    "16_requests_T8": Plan(requests=16, queries=8, budget=4, calls=PLAN_CALLS),
    "16_requests_T8_14K": Plan(requests=16, queries=8, budget=14, calls=PLAN_CALLS),
    "128_requests_T1": Plan(requests=128, queries=1, budget=2, calls=PLAN_CALLS),
    "16_requests_T1": Plan(requests=16, queries=1, budget=2, calls=PLAN_CALLS),
}

PLAN_VARIANTS = {
    "16 warps": plan_triton.Tuning(warps=16),
    "16 warps, block 4096, slots 2048": plan_triton.Tuning(warps=16, block=4096, slots=2048),
    "block 4096": plan_triton.Tuning(block=4096),
    "block 16384": plan_triton.Tuning(block=16384),
    "slots 8192": plan_triton.Tuning(slots=8192),
    "moves 1024": plan_triton.Tuning(moves=1024),
    "look 512, 4 warps": plan_triton.Tuning(look_block=512, look_warps=4),
    "look 2048": plan_triton.Tuning(look_block=2048),
}


PlanChain = Chain[PlanTables, Operands, PlanResult]


class PlanCase:
    """Operands of a plan and what the reference makes of them, made when they are asked for."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self.plan = name, dataclasses.replace(plan, calls=PLAN_CALLS)

    @functools.cached_property
    def work(self) -> Any:  # noqa: ANN401
        """The operands and the traffic."""
        return self.plan.build("reference")

    @functools.cached_property
    def expected(self) -> Any:  # noqa: ANN401
        """What the reference plans, step by step, and the tables in the end."""
        return self.results(_steps_of(plan_reference.plan))

    def results(self, run: PlanChain) -> Any:  # noqa: ANN401
        """What a chain of steps plans, and the tables after it."""
        tables, _ = operands = self.work.operands
        return run(jax.tree.map(jnp.copy, tables), operands)

    def trial(self, variant: str, tuning: plan_triton.Tuning) -> Trial:
        """Check and time of one variant, which is compiled once for both."""
        run = _steps_of(functools.partial(plan_triton.plan, tuning=tuning, interpret=INTERPRET))

        def timed() -> float:
            state = jax.tree.map(jnp.copy, self.work.operands[0])
            return measure_chain(run, state, self.work.operands, calls=PLAN_CALLS)[0].median

        check = lambda: equal(self.results(run), self.expected)
        return Trial(("plan", self.name, variant), self.work.traffic, check, timed)


def _steps_of(plan: Callable[..., Any]) -> PlanChain:
    def step(tables: PlanTables, operands: Operands, call: int) -> tuple[PlanTables, PlanResult]:
        first, steps = operands
        result, tables = plan(steps[call], tables if call else first, page_slots=PAGE_SLOTS)
        return tables, result

    return chain(step, PLAN_CALLS)


def plan_trials(cases: list[PlanCase]) -> Iterator[Trial]:
    """The default for every case, then the sweep for the first two."""
    for case in cases:
        yield case.trial("default", plan_triton.Tuning())
    for variant, tuning in PLAN_VARIANTS.items():
        for case in cases[:2]:
            yield case.trial(variant, tuning)


def kernel_times(case: PlanCase) -> dict[str, float]:
    """Microseconds per step of every kernel of the default plan, from a profiler's trace."""
    run = _steps_of(functools.partial(plan_triton.plan, interpret=INTERPRET))
    jax.block_until_ready(case.results(run))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(case.results(run))
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
