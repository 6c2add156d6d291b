"""Running a cell: warm-up, timed steps, a profile, and what came of it."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from bench.shard_cells import Cell, abstract_operands, decode_state, no_profile, step_program
from bench.shard_setup import Setup
from bench.shard_state import HostPool, Pattern, hosts_of, warm_state
from bench.stages import by_stage, profiled, scopes_of
from dhisparse_jax.engine.output import places, unpacked
from dhisparse_jax.hierarchy.state import HOST_LEAVES, host_sharding
from dhisparse_jax.models.glm.costs import Rates, StepLoad, stage_seconds, step_seconds, step_work
from dhisparse_jax.step import StepOutput

_ONE_AT_A_TIME = threading.Lock()


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


class Loaded(NamedTuple):
    """What is in memory for all cells of one draft.

    Attributes:
        setup: shapes.
        params: weights, with what is replayed.
        draft_params: of the draft.
        draft_bytes: weights of the draft alone.
    """

    setup: Setup
    params: Any
    draft_params: Any
    draft_bytes: int


class Program(NamedTuple):
    """A compiled step.

    Attributes:
        step: the executable.
        scopes: see `stages.scopes_of`.
        seconds: that compiling took, tracing included.
    """

    step: Any
    scopes: dict[str, str]
    seconds: float


def compile_step(loaded: Loaded, cell: Cell) -> Program:
    """Compile the step of a cell, from shapes."""
    begin = time.perf_counter()
    setup, cfg = loaded.setup, loaded.setup.config(cell)
    operands = abstract_operands(cfg, setup.drafter, setup.params, setup.draft_params)
    with _ONE_AT_A_TIME:  # Python; compilers of several programs may work at once
        lowered = step_program(setup.model, setup.drafter, cfg).lower(*_placed(operands))
    step = lowered.compile()
    return Program(step, scopes_of(step.as_text() or ""), time.perf_counter() - begin)


def _placed(operands: Any) -> Any:  # noqa: ANN401  # any pytree
    """Shapes with the memory that each is in."""
    host, device = host_sharding(), SingleDeviceSharding(jax.devices()[0])

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401
        if getattr(path[-1], "name", "") in HOST_LEAVES:
            return in_host_memory(leaf, host)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    return jax.tree_util.tree_map_with_path(place, operands)


def in_host_memory(leaf: jax.ShapeDtypeStruct, host: SingleDeviceSharding) -> Any:  # noqa: ANN401
    """A shape of an array in host memory."""
    if jax.__version_info__ < (0, 11):  # no shape can say so, but an array can
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), host)
    moved = jax.eval_shape(lambda array: jax.device_put(array, jax.memory.Space.Host), leaf)
    return moved.update(sharding=host)


class Ran(NamedTuple):
    """What a cell gives: its figures, and the host pools for the next one."""

    figures: dict[str, Any]
    hosts: list[HostPool]


def run_cell(
    loaded: Loaded,
    cell: Cell,
    program: Program,
    patterns: list[Pattern],
    hosts: list[HostPool],
    history: int,
    plan: Plan,
    rates: Rates,
) -> Ran:
    """Run a cell over host pools that it uses up and gives back."""
    setup, cfg = loaded.setup, loaded.setup.config(cell)
    text = loaded.params.replay.text
    hierarchy = warm_state(cfg, patterns, hosts, history)
    state = decode_state(cfg, setup.drafter, hierarchy, text, history)
    device = SingleDeviceSharding(jax.devices()[0])
    free, profile = deque(jax.device_put(places(cfg, 1), device)), no_profile(cfg)
    profile = jax.device_put(profile, device)
    outputs: list[StepOutput] = []

    def advance(count: int) -> float:
        nonlocal state
        begin, pending = time.perf_counter(), deque()
        for _ in range(count):
            state, out = program.step(
                loaded.params, loaded.draft_params, profile, state, free.popleft()
            )
            pending.append(out)
            if len(pending) > 1:
                outputs.append(unpacked(pending[0]))
                free.append(pending.popleft())
        outputs.append(unpacked(pending[0]))
        free.append(pending.popleft())
        return time.perf_counter() - begin

    begin = time.perf_counter()
    jax.block_until_ready(state)
    admitted = time.perf_counter() - begin
    advance(plan.warm)
    half = max(1, plan.steps // 2)
    seconds = [advance(half), advance(plan.steps - half)] if plan.steps > half else [advance(half)]
    timed = outputs[plan.warm :]
    kernels = profiled(lambda: advance(plan.profiled)) if plan.profiled else {}
    stages = {
        stage: 1e3 * spent / max(plan.profiled, 1)
        for stage, spent in by_stage(kernels, program.scopes).items()
    }
    figures = {
        "requests": cell.requests,
        "context": history,
        "policy": cell.policy.value,
        "draft": cell.draft,
        "hot_rows": cfg.hot_slots,
        **figures_of(loaded, cell, timed[: plan.steps], sum(seconds), rates, history),
        "step_ms_halves": [1e3 * seconds[0] / half]
        + ([1e3 * seconds[1] / (plan.steps - half)] if len(seconds) > 1 else []),
        "stages_ms": dict(sorted(stages.items(), key=lambda item: -item[1])),
        "kernels_ms": top_kernels(kernels, max(plan.profiled, 1)),
        "hbm_gb": _used_gb(),
        "compile_s": program.seconds,
        "state_s": admitted,
        "tokens_as_replayed": all(
            bool((output.tokens[0] == np.asarray(text)).all()) for output in outputs
        ),
    }
    return Ran(figures, hosts_of(state.hierarchy))


def figures_of(
    loaded: Loaded,
    cell: Cell,
    outputs: Sequence[StepOutput],
    seconds: float,
    rates: Rates,
    history: int,
) -> dict[str, Any]:
    """What the timed steps did, beside the least that they must take."""
    setup, cfg = loaded.setup, loaded.setup.config(cell)
    config, experts = setup.model.config, setup.model.experts
    steps = len(outputs)
    tokens = sum(int(output.count.sum()) for output in outputs)
    selected = np.mean([output.records.selected for output in outputs])
    fetched = np.mean([output.records.fetched[0] for output in outputs], axis=0)
    staged = np.mean([output.records.staged for output in outputs])
    words = np.asarray([cfg.record_words(pool) for pool in range(cfg.pools)])
    link = 4.0 * float((fetched.sum(axis=1) * words).sum())
    load = StepLoad(
        requests=cell.requests,
        queries=cfg.queries,
        context=history,
        attended=float(selected),
        fetched=float(fetched.mean()),
    )
    work = step_work(config, experts, cfg, load, loaded.draft_bytes)
    floor = step_seconds(work, rates)
    step = seconds / steps
    return {
        "tokens_per_s": tokens / seconds,
        "tpot_ms": 1e3 * seconds * cell.requests / tokens,
        "step_ms": 1e3 * step,
        "steps": steps,
        "tokens_per_step": tokens / steps / cell.requests,
        "union": float(selected) / config.index_top_k,
        "fetched_per_k": float(fetched.mean()) / config.index_top_k,
        "fetched_share": float(fetched.mean() / selected),
        "staged_share": float(staged / selected),
        "link_gb_per_step": link / 1e9,
        "floor_ms": 1e3 * floor,
        "floor_ratio": step / floor,
        "floor_stages_ms": {s: 1e3 * t for s, t in stage_seconds(work, rates).items()},
    }


def top_kernels(
    kernels: dict[str, tuple[float, int]], steps: int, count: int = 25
) -> list[list[Any]]:
    """The kernels that take longest: name, milliseconds and calls per step."""
    order = sorted(kernels.items(), key=lambda item: -item[1][0])[:count]
    return [[name[:60], 1e3 * spent / steps, calls / steps] for name, (spent, calls) in order]


def _used_gb() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_in_use", 0)) / 1e9


def replay_arrays(shapes: Any, selections: Any, trace: Any, text: Any, history: int) -> Any:  # noqa: ANN401
    """`shard_model.Replay` with its arrays on the device."""
    values = {
        "on": jnp.asarray(True),
        "selections": jnp.asarray(selections),
        "trace": jnp.asarray(trace),
        "history": jnp.int32(history),
        "text": jnp.asarray(text),
    }
    device = SingleDeviceSharding(jax.devices()[0])
    return type(shapes)(**{name: jax.device_put(leaf, device) for name, leaf in values.items()})
