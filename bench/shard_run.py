"""Running a cell: warm-up, timed steps, a profile, and what came of it."""

import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from bench.shard_cells import Cell, decode_state, no_profile
from bench.shard_compile import Program
from bench.shard_figures import figures_of, reached
from bench.shard_load import Loaded
from bench.shard_segments import zeros_like
from bench.shard_state import HostPool, Pattern, hosts_of, warm_state
from bench.stages import Event, Kernel, Programs, by_stage, profiled, timeline
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.configs.gpus import Rates
from dhisparse_jax.engine.output import places, unpacked
from dhisparse_jax.step import DecodeState, StepOutput


class Plan(NamedTuple):
    """How long a cell runs.

    Attributes:
        warm: steps before the clock starts; caches settle and adaptive residency learns.
        steps: timed.
        profiled: after them, with a profile.
    """

    warm: int
    steps: int
    profiled: int

    @property
    def total(self) -> int:
        """Steps of a cell."""
        return self.warm + self.steps + self.profiled


class Common(NamedTuple):
    """What all cells have in common.

    Attributes:
        patterns: what pools repeat.
        history: positions of every request.
        plan: how long a cell runs.
        rates: measured on this machine.
    """

    patterns: list[Pattern]
    history: int
    plan: Plan
    rates: Rates


class Ran(NamedTuple):
    """What a cell gives: its figures, and the host pools for the next one."""

    figures: dict[str, Any]
    hosts: list[HostPool]


class _Stepper:
    """Dispatches steps, one ahead of the outputs that are read.

    Attributes:
        state: after the last step.
        outputs: of all steps so far.
        dispatching: seconds that went into it, of all steps so far.
    """

    def __init__(
        self, loaded: Loaded, cfg: HierarchyConfig, program: Program, state: DecodeState
    ) -> None:
        device = SingleDeviceSharding(jax.devices()[0])
        self.state = state
        self.outputs: list[StepOutput] = []
        self.dispatching = 0.0
        self._step = program.load()
        self._params = loaded.params, loaded.draft_params
        self._profile = jax.device_put(no_profile(cfg), device)
        self._free = deque(jax.device_put(places(cfg, 1), device))
        self._between = jax.device_put(zeros_like(program.between), device)

    def advance(self, count: int) -> float:
        """Seconds that so many steps take."""
        begin, pending = time.perf_counter(), deque()
        for _ in range(count):
            place = self._free.popleft()
            called = time.perf_counter()
            self.state, out, self._between = self._step(
                *self._params, self._profile, self.state, place, self._between
            )
            self.dispatching += time.perf_counter() - called
            pending.append(out)
            if len(pending) > 1:
                self._read(pending.popleft())
        while pending:
            self._read(pending.popleft())
        return time.perf_counter() - begin

    def _read(self, out: Any) -> None:  # noqa: ANN401  # a packed output
        self.outputs.append(unpacked(out))
        self._free.append(out)


def run_cell(
    loaded: Loaded, cell: Cell, program: Program, hosts: list[HostPool], common: Common
) -> Ran:
    """Run a cell over host pools that it uses up and gives back."""
    setup, cfg, plan = loaded.setup, loaded.setup.config(cell), common.plan
    text = loaded.params.replay.text
    begin = time.perf_counter()
    hierarchy = warm_state(cfg, common.patterns, hosts, common.history)
    state = decode_state(cfg, setup.drafter, hierarchy, text, common.history)
    jax.block_until_ready(state)
    admitted = time.perf_counter() - begin
    stepper = _Stepper(loaded, cfg, program, state)
    del hierarchy, state  # the first step is given their memory
    stepper.advance(plan.warm)
    dispatching = stepper.dispatching
    halves = [count for count in (plan.steps - plan.steps // 2, plan.steps // 2) if count]
    seconds = [stepper.advance(count) for count in halves]
    dispatching = stepper.dispatching - dispatching
    timed = stepper.outputs[plan.warm :]
    events = profiled(lambda: stepper.advance(plan.profiled)) if plan.profiled else []
    figures: dict[str, Any] = {
        "requests": cell.requests,
        "context": common.history,
        "policy": cell.policy.value,
        "draft": cell.draft,
        "hot_rows": cfg.hot_slots(0),
        **figures_of(loaded, cell, timed, sum(seconds), common.history, common.rates),
        "dispatch_ms": 1e3 * dispatching / plan.steps,
        "step_ms_halves": [1e3 * s / n for s, n in zip(seconds, halves, strict=True)],
        **_stages(events, program.kernels, max(plan.profiled, 1)),
        "hbm_gb": _used_gb(),
        "compile_s": program.seconds,
        "state_s": admitted,
        "tokens_as_replayed": all(
            bool((output.tokens[0] == np.asarray(text)).all()) for output in stepper.outputs
        ),
    }
    figures["reached"] = reached(figures["floor_stages_ms"], figures["stages_ms"])
    return Ran(figures, hosts_of(stepper.state.hierarchy))


def _stages(events: list[Event], programs: Programs, steps: int) -> dict[str, Any]:
    """Milliseconds of a step by stage and by kernel, longest first, and two groups over time."""
    stages = {stage: 1e3 * spent / steps for stage, spent in by_stage(events, programs).items()}
    return {
        "stages_ms": dict(sorted(stages.items(), key=lambda item: -item[1])),
        "kernels_ms": top_kernels(events, steps),
        "timeline_us": timeline(events, programs),
    }


def top_kernels(events: list[Event], steps: int, count: int = 60) -> list[list[Any]]:
    """The kernels that take longest: program, name, milliseconds and calls per step."""
    spent: dict[Kernel, list[float]] = defaultdict(list)
    for event in events:
        spent[event.kernel].append(event.seconds)
    order = sorted(spent.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        [kernel.program, kernel.name[:60], 1e3 * sum(seconds) / steps, len(seconds) / steps]
        for kernel, seconds in order
    ]


def _used_gb() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_in_use", 0)) / 1e9
