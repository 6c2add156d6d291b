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

from bench.ops.plan import Operands, Plan, plan_step
from bench.trials import INTERPRET, Trial, equal
from dhisparse_jax.engine.timing import Chain, chain, measure_chain
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

LOOK_UPS = {
    "look 384 programs": plan_triton.Tuning(look_programs=384),
    "look 1024 programs": plan_triton.Tuning(look_programs=1024),
    "look 512 programs, 8 warps": plan_triton.Tuning(
        look_block=256, look_warps=8, look_programs=512
    ),
    "look 128 programs, 32 warps": plan_triton.Tuning(
        look_block=1024, look_warps=32, look_programs=128
    ),
}
"""What matters where there is much to look up: for the first case."""

SETTLINGS = {
    "block 8192, slots 4096": plan_triton.Tuning(block=8192, slots=4096),
    "8 warps, block 2048, slots 1024": plan_triton.Tuning(warps=8, block=2048, slots=1024),
}
"""What matters however many requests there are: for the first two cases."""


PlanChain = Chain[PlanTables, Operands, PlanResult | None]


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
        """What the reference plans in the last step, and the tables in the end."""
        return self.results(_steps_of(plan_reference.plan))

    def results(self, run: PlanChain) -> Any:  # noqa: ANN401
        """What a chain of steps plans in the end, and the tables after it."""
        return run(jax.tree.map(jnp.copy, self.work.state), self.work.operands)

    def trial(self, variant: str, tuning: plan_triton.Tuning, **options: str | int) -> Trial:
        """Check and time of one variant, which is compiled once for both."""
        plan = functools.partial(plan_triton.plan, tuning=tuning, interpret=INTERPRET)
        run, state = _steps_of(plan, **options), self.work.state

        def timed() -> float:
            operands = self.work.operands
            return measure_chain(run, state, operands, calls=PLAN_CALLS, anew=True)[0].median

        check = lambda: equal(self.results(run), self.expected)
        return Trial(("plan", self.name, variant), self.work.traffic, check, timed)


def _steps_of(plan: Callable[..., Any], **options: str | int) -> PlanChain:
    return chain(plan_step(plan, PAGE_SLOTS), PLAN_CALLS, **options)


def plan_trials(cases: list[PlanCase]) -> Iterator[Trial]:
    """The default for every case, and without CUDA graphs, then the sweeps."""
    default = plan_triton.Tuning()
    for case in cases:
        yield case.trial("default", default)
    for case in cases[:2]:
        yield case.trial("no CUDA graph", default, xla_gpu_graph_min_graph_size=1000)
    for few, variants in ((1, LOOK_UPS), (2, SETTLINGS)):
        for variant, tuning in variants.items():
            for case in cases[:few]:
                yield case.trial(variant, tuning)


def kernel_times(case: PlanCase) -> dict[str, float]:
    """Microseconds per step of every kernel of the default plan, from a profiler's trace."""
    run = _steps_of(functools.partial(plan_triton.plan, interpret=INTERPRET))
    jax.block_until_ready(case.results(run))
    state = jax.block_until_ready(jax.tree.map(jnp.copy, case.work.state))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(state, case.work.operands))
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
