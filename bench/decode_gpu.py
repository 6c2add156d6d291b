"""One decode GPU of a deployment: GLM-5.3 at real per-GPU shapes, policies and drafts.

The step is the library's own (`dhisparse_jax.step.decode_step`), with its hierarchy and kernels,
over one GPU's share of the model (`bench.shard_model`). What is executed and what is modelled is
said at the top of every result. Layers are unrolled, since a loop over stacked weights copies each
layer's slice.

    python -m bench.decode_gpu --model glm-5.3 --json decode_gpu.json
    python -m bench.decode_gpu --model tiny --context 512 --requests 2 --steps 4   # anywhere
"""

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Int

from bench.record import environment, save, write
from bench.replayed import (
    PUBLISHED_SURVIVAL,
    ReplayedDraft,
    followed,
    selections,
)
from bench.roofline import Floors, measure_floors
from bench.shard_cells import Cell
from bench.shard_memory import Account, account, fitting_rows, resident_requests
from bench.shard_model import Replay, ShardParams
from bench.shard_report import console, ratios, said, table_of, tell
from bench.shard_run import Loaded, Plan, compile_step, replay_arrays, run_cell
from bench.shard_setup import Setup, abstract_setup
from bench.shard_state import host_pools, patterns
from bench.shard_weights import Weights, random_like, random_weights
from dhisparse_jax.config import Policy
from dhisparse_jax.models.draft.drafter import DrafterParams
from dhisparse_jax.models.glm.costs import Rates

CELLS = ("resident", "fixed", "adaptive", "fixed_dflash2", "adaptive_dflash2")
FIXED_ROWS = 2
"""Slots of `fixed` per request, in units of the top-K: HiSparse's default."""

DISABLED = "--xla_disable_hlo_passes=rematerialization"
"""Weights fill the memory, which makes XLA compute things twice to save what is left."""


def main(  # noqa: PLR0913  # a command's options
    model: Annotated[str, typer.Option(help="Preset: glm-5.3, or tiny.")] = "glm-5.3",
    cells: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CELLS),
    requests: Annotated[int, typer.Option(help="Requests on this GPU.")] = 16,
    context: Annotated[int, typer.Option(help="Positions of each when it starts.")] = 100_000,
    steps: Annotated[int, typer.Option(help="Timed steps per cell.")] = 24,
    warm: Annotated[int, typer.Option(help="Steps before them.")] = 12,
    layers: Annotated[int | None, typer.Option(help="Only so many layers.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that share the experts.")] = 8,
    hbm_gb: Annotated[float | None, typer.Option(help="Device memory; default: all.")] = None,
    host_gb: Annotated[int, typer.Option(help="Limit of pinned memory, GiB.")] = 110,
    profile: Annotated[int, typer.Option(help="Steps profiled per cell.")] = 2,
    expert_kernel: Annotated[str, typer.Option(help="reference (XLA) or triton.")] = "reference",
    jobs: Annotated[int, typer.Option(help="Programs compiled at the same time.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure the cells, one after the other, over the same weights and host pools."""
    _prepare(host_gb)
    names = cells.split(",")
    drafts = sorted({_draft_of(name) for name in names})
    plan = Plan(warm, steps, profile)
    clock = _Clock()
    room = plan.total * 8 + 16
    setups = {
        draft: abstract_setup(
            model,
            layers=layers,
            context=context,
            room=room,
            draft=draft,
            requests=requests,
            traces=max(16, requests),
            gpus=gpus,
            expert_backend=expert_kernel,  # type: ignore[arg-type]  # checked where it is used
        )
        for draft in drafts
    }
    limit = (hbm_gb or _device_gb()) * 1e9
    made = [_cell(name, setups[_draft_of(name)], requests, limit) for name in names]
    floors = _floors(model)
    document: dict[str, Any] = {
        "bench": "decode_gpu",
        **environment(),
        **said(setups[drafts[0]], requests, context, layers, gpus, floors),
        "memory_gb": {cell.name: _gb(account(setups[cell.draft], cell)) for cell in made},
        "cells": {},
    }
    console.print_json(data={key: document[key] for key in ("executed", "modelled", "memory_gb")})
    clock.mark("floors")
    with ThreadPoolExecutor(jobs) as pool:
        compiling = {
            cell.name: pool.submit(compile_step, _shapes(setups[cell.draft]), cell) for cell in made
        }
        base = setups[made[0].draft].config(made[0])
        repeated = patterns(base)
        hosts = host_pools(base, repeated)
        clock.mark("host pools")
        weights = random_weights(setups[drafts[0]].params.weights)
        jax.block_until_ready(weights)
        clock.mark("weights")
        # All of them before the first cell: autotuning needs memory too.
        programs = {name: future.result() for name, future in compiling.items()}
        clock.mark("waiting for programs")
    chosen = _chosen(setups[drafts[0]], context, room)
    loaded: dict[str, Loaded] = {}
    for cell in made:
        if cell.draft not in loaded:
            loaded.clear()  # weights of one draft at a time
            loaded[cell.draft] = _load(setups[cell.draft], weights, chosen, context)
        ran = run_cell(
            loaded[cell.draft],
            cell,
            programs.pop(cell.name),
            repeated,
            hosts,
            context,
            plan,
            _rates(floors),
        )
        hosts = ran.hosts
        clock.mark(cell.name)
        document["cells"][cell.name] = ran.figures
        document["seconds"] = dict(clock.marks)
        save(document, json)
        tell(cell.name, ran.figures)
    document |= {"ratios": ratios(document["cells"])}
    console.print(table_of(document["cells"]))
    write(document, json)


def _prepare(host_gb: int) -> None:
    """Settings that JAX reads when it starts; what is set already stays."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_gb))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    flags = os.environ.get("XLA_FLAGS", "")
    if DISABLED not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DISABLED}".strip()


class _Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.marks[name] = now - self._last
        self._last = now
        console.print(f"{name}: {self.marks[name]:.1f} s")


def _draft_of(name: str) -> str:
    """`adaptive_dflash2` has the draft `dflash2`."""
    _, _, draft = name.partition("_")
    return draft or "none"


def _cell(name: str, setup: Setup, requests: int, limit: float) -> Cell:
    """The cell of a name, as large as memory lets it be."""
    policy = Policy(name.partition("_")[0])
    cell = Cell(
        name=name, policy=policy, draft=_draft_of(name), requests=requests, hot_rows=setup.capacity
    )
    if policy is Policy.RESIDENT:
        return dataclasses.replace(cell, requests=resident_requests(setup, cell, limit))
    if policy is Policy.FIXED:
        rows = min(setup.capacity, FIXED_ROWS * setup.model.config.index_top_k)
        return dataclasses.replace(cell, hot_rows=rows)
    return dataclasses.replace(cell, hot_rows=fitting_rows(setup, cell, limit))


def _shapes(setup: Setup) -> Loaded:
    """What compiling needs of `Loaded`."""
    return Loaded(setup, setup.params, setup.draft_params, 0)


def _chosen(setup: Setup, context: int, room: int) -> Int[np.ndarray, "traces rows K"]:
    traces, _, k = setup.params.replay.selections.shape
    return selections(traces, k=k, history=context, rows=room + 8)


def _load(
    setup: Setup, weights: Weights, chosen: Int[np.ndarray, "traces rows K"], context: int
) -> Loaded:
    """What is replayed, and the draft's weights, on the device."""
    config, shapes = setup.model.config, setup.params.replay
    rng = np.random.default_rng(0)
    replay = replay_arrays(
        shapes,
        chosen[:, : shapes.selections.shape[1]],
        followed(len(config.groups), shapes.text.shape[0], len(chosen)),
        rng.integers(0, config.vocab_size, shapes.text.shape, np.int32),
        context,
    )
    size, draft = _draft_params(setup, weights, replay)
    return Loaded(setup, ShardParams(weights=weights, replay=replay), draft, size)


def _draft_params(setup: Setup, weights: Weights, replay: Replay) -> tuple[int, Any]:
    drafter = setup.drafter
    if not drafter.length:
        return 0, ()
    shapes = setup.draft_params.inner
    own = random_like(shapes["draft"], -1 % 2**20)
    inner = DrafterParams(draft=own, embedding=weights.embedding, head=weights.head)
    survival = [*PUBLISHED_SURVIVAL, *[PUBLISHED_SURVIVAL[-1]] * 8][: drafter.length]
    params = ReplayedDraft(
        inner=inner,
        on=replay.on,
        text=replay.text,
        survival=jnp.asarray(survival, jnp.float32),
        key=jax.random.key(7),
    )
    return sum(leaf.nbytes for leaf in jax.tree.leaves(own)), params


def _device_gb() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", 8e9)) / 1e9


def _floors(model: str) -> Floors:
    small = {"copy_bytes": 1 << 24, "side": 256} if model == "tiny" else {}
    return measure_floors(5, **small)


def _rates(floors: Floors) -> Rates:
    return Rates(
        hbm=1e9 * floors.hbm_gbps, link=1e9 * floors.h2d_gbps, flops=1e12 * floors.bf16_tflops
    )


def _gb(each: Account) -> dict[str, float]:
    return {kind: round(size / 1e9, 3) for kind, size in each.bytes.items()}


if __name__ == "__main__":
    typer.run(main)
