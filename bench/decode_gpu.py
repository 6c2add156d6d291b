"""One decode GPU of a deployment: GLM-5.3 at real per-GPU shapes, policies and drafts in one run.

The step is the library's own (`dhisparse_jax.step.decode_step`), with its hierarchy and its kernels,
over one GPU's share of the model (`bench.shard_model`). What is executed and what is modelled is
said at the top of every result. Layers are unrolled, since a loop over stacked weights copies each
layer's slice.

    python -m bench.decode_gpu --model glm-5.3 --json decode_gpu.json
    python -m bench.decode_gpu --model tiny --context 512 --requests 2 --steps 4   # anywhere
"""

import dataclasses
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.record import environment, save, write
from bench.replayed import (
    PUBLISHED_SURVIVAL,
    PUBLISHED_TOKENS_PER_STEP,
    ReplayedDraft,
    followed,
    selections,
    tokens_per_step,
)
from bench.roofline import Floors, measure_floors
from bench.shard_cells import Cell
from bench.shard_memory import Account, account, fitting_rows, resident_requests
from bench.shard_run import Loaded, Plan, Program, compile_step, replay_arrays, run_cell
from bench.shard_setup import Setup, abstract_setup
from bench.shard_state import host_pools, patterns
from bench.shard_weights import random_like, random_weights
from dhisparse_jax.config import Policy
from dhisparse_jax.models.draft.drafter import DrafterParams
from dhisparse_jax.models.glm.costs import Rates
from dhisparse_jax.speculation.protocol import Drafter

CELLS = ("resident", "fixed", "adaptive", "fixed_dflash2", "adaptive_dflash2")
FIXED_ROWS = 2
"""Slots of `fixed` per request, in units of the top-K: HiSparse's default."""

DISABLED = "--xla_disable_hlo_passes=rematerialization"
"""Weights fill the memory, which makes XLA compute things twice to save what is left."""

console = Console(stderr=True)


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
        )
        for draft in drafts
    }
    limit = (hbm_gb or _device_gb()) * 1e9
    made = [_cell(name, setups[_draft_of(name)], requests, limit) for name in names]
    floors = _floors(model)
    document: dict[str, Any] = {
        "bench": "decode_gpu",
        **environment(),
        **_said(setups[drafts[0]], requests, context, layers, gpus, floors),
        "memory_gb": {
            cell.name: _gb(account(setups[cell.draft], cell)) for cell in made
        },
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
        loaded = _load(setups, context, room)
        jax.block_until_ready([each.params for each in loaded.values()])
        clock.mark("weights")
        for cell in made:
            program = _compiled(compiling.pop(cell.name))
            clock.mark(f"waiting for {cell.name}")
            ran = run_cell(
                loaded[cell.draft], cell, program, repeated, hosts, context, plan, _rates(floors)
            )
            hosts = ran.hosts
            del program
            clock.mark(cell.name)
            document["cells"][cell.name] = ran.figures
            document["seconds"] = dict(clock.marks)
            save(document, json)
            _tell(cell.name, ran.figures)
    document |= {"ratios": _ratios(document["cells"])}
    console.print(_table(document["cells"]))
    write(document, json)


def _prepare(host_gb: int) -> None:
    """Settings that JAX reads when it starts; what is set already stays."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_gb))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    flags = os.environ.get("XLA_FLAGS", "")
    if DISABLED not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DISABLED}".strip()


def _compiled(future: "Future[Program]") -> Program:
    return future.result()


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


def _load(setups: dict[str, Setup], context: int, room: int) -> dict[str, Loaded]:
    """Weights and what is replayed, on the device; all drafts share the target's weights."""
    first = next(iter(setups.values()))
    config = first.model.config
    weights = random_weights(first.params.weights)
    replay = first.params.replay
    traces, rows, k = replay.selections.shape
    del rows
    chosen = selections(traces, k=k, history=context, rows=room + 8)
    loaded = {}
    for draft, setup in setups.items():
        shapes = setup.params.replay
        rng = np.random.default_rng(0)
        text = rng.integers(0, config.vocab_size, shapes.text.shape, np.int32)
        own = replay_arrays(
            shapes,
            chosen[:, : shapes.selections.shape[1]],
            followed(len(config.groups), shapes.text.shape[0], traces),
            text,
            context,
        )
        params = type(setup.params)(weights=weights, replay=own)
        size, draft_params = _draft_params(setup, setup.drafter, weights, own)
        loaded[draft] = Loaded(setup, params, draft_params, size)
    return loaded


def _draft_params(setup: Setup, drafter: Drafter, weights: Any, replay: Any) -> tuple[int, Any]:  # noqa: ANN401
    if not drafter.length:
        return 0, ()
    shapes = setup.draft_params.inner
    own = random_like(shapes["draft"], jax.random.key(1, impl="rbg"))
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
    return Rates(hbm=1e9 * floors.hbm_gbps, link=1e9 * floors.h2d_gbps, flops=1e12 * floors.bf16_tflops)


def _gb(each: Account) -> dict[str, float]:
    return {kind: round(size / 1e9, 3) for kind, size in each.bytes.items()}


def _said(
    setup: Setup, requests: int, context: int, layers: int | None, gpus: int, floors: Floors
) -> dict[str, Any]:
    """What every result says at its top."""
    config = setup.model.config
    return {
        "model": {
            "layers": config.num_layers,
            "of": "all layers" if layers is None else f"the first {layers}",
            "experts_here": setup.model.experts,
            "experts": config.num_experts,
            "gpus": gpus,
            "groups": [len(group) for group in config.groups],
        },
        "floors": floors._asdict(),
        "executed": [
            f"decode_step of the library, {requests} requests x {context} positions, all kernels",
            f"{config.num_layers} layers: attention, indexer with top-K, norms, router, shared "
            f"expert, {setup.model.experts} of {config.num_experts} experts, head; weights random, "
            "fp8 with a scale per output channel, bfloat16 products",
            "the draft model, with random weights, its ring full",
            "host pools of full size in pinned memory; retrieval, backup, adaptation",
        ],
        "modelled": [
            "selections: calibrated traces (bench.traces) in place of the indexer's, whose scores "
            "and top-K are computed all the same",
            f"experts: {gpus} GPUs' tokens as uniform picks, so that each expert has the load that "
            "they send; no all-to-all",
            f"acceptance: survival by position {PUBLISHED_SURVIVAL}, "
            f"{tokens_per_step(PUBLISHED_SURVIVAL):.2f} tokens per step (published for a DSpark of "
            f"GLM-5.2; the mean published beside it is {PUBLISHED_TOKENS_PER_STEP})",
            "sizes of the draft, as far as they are not published (bench.shard_setup.draft_config)",
            "one host per GPU: the link is not shared",
        ],
    }


def _ratios(cells: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of each cell, in units of `fixed` and of `adaptive`."""
    found = {}
    for base in ("resident", "fixed", "adaptive"):
        if base in cells:
            for name, cell in cells.items():
                found[f"{name}/{base}"] = cell["tokens_per_s"] / cells[base]["tokens_per_s"]
    return found


def _tell(name: str, figures: dict[str, Any]) -> None:
    console.print(
        f"[bold]{name}[/]: {figures['tokens_per_s']:.1f} tokens/s, step {figures['step_ms']:.2f} ms "
        f"(floor {figures['floor_ms']:.2f}), TPOT {figures['tpot_ms']:.2f} ms, "
        f"fetched {figures['fetched_share']:.2%}, link {figures['link_gb_per_step']:.3f} GB/step"
    )
    console.print({k: round(v, 3) for k, v in figures["stages_ms"].items()})


def _table(cells: dict[str, Any]) -> Table:
    table = Table(title="One decode GPU")
    for name in ("cell", "requests", "tokens/s", "TPOT ms", "step ms", "floor ms", "x", "fetched"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for name, each in cells.items():
        table.add_row(
            name,
            str(each["requests"]),
            f"{each['tokens_per_s']:.1f}",
            f"{each['tpot_ms']:.2f}",
            f"{each['step_ms']:.2f}",
            f"{each['floor_ms']:.2f}",
            f"{each['floor_ratio']:.2f}",
            f"{each['fetched_share']:.2%}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
