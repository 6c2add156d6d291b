"""One decode GPU of a deployment: a model at real per-GPU shapes, policies, drafts and loads.

The step is the library's own (`dhisparse_jax.step`), with its hierarchy and kernels,
over one GPU's share of the model (`bench.shard_model`), dispatched group by group
(`bench.shard_segments`). What is executed and what is modelled is said at the top of every result.

    python -m bench.decode_gpu --model glm-5.3 --json decode_gpu.json
    python -m bench.decode_gpu --cells fixed,adaptive --loads 4,8,16,32,48,64 --json sweep.json
    python -m bench.decode_gpu --cells resident,adaptive --loads 1,2,4 --json low.json
    python -m bench.decode_gpu --model deepseek-v4.1-flash --context 500000 --loads 64 \
        --cells resident_dspark,adaptive_dspark --json decode_gpu_v41.json
    python -m bench.decode_gpu --model tiny --context 512 --loads 2 --steps 4   # anywhere
"""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from bench.record import environment, save, write
from bench.shard_memory import account
from bench.shard_report import console, prepared, ratios, said, table_of, tell
from bench.shard_run import Plan
from bench.shard_session import Asked, Planned, Session, planned
from bench.shard_setup import shard_of
from bench.shard_sweep import bounded, compared_with_resident, row_of
from dhisparse_jax.configs.gpus import Rates
from dhisparse_jax.configs.workload import survival_for
from dhisparse_jax.engine.rates import Floors, measure_floors
from dhisparse_jax.models.glm.memory import Account

CELLS = ("resident", "fixed", "adaptive", "fixed_dflash2", "adaptive_dflash2")

FLAGS = (
    "--xla_disable_hlo_passes=rematerialization "
    "--xla_gpu_experimental_enable_fusion_autotuner=false"
)
"""Weights fill the memory, which makes XLA compute things twice to save what is left. And it
compiles and times a second version of every fusion: of 1,038 it kept the first of 1,006."""

HOST_SPARE = 2**30
"""Bytes of pinned memory for what goes to the device and back."""


def main(  # noqa: PLR0913  # a command's options
    model: Annotated[
        str, typer.Option(help="glm-5.3, deepseek-v4.1-flash, tiny, tiny-v4.1.")
    ] = "glm-5.3",
    cells: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CELLS),
    loads: Annotated[str, typer.Option(help="Requests on this GPU, comma-separated.")] = "16",
    tpot_ms: Annotated[
        str, typer.Option(help="Bounds in ms, beside what each cell has at its own best.")
    ] = "",
    accept_length: Annotated[
        float | None, typer.Option(help="Tokens per step; default: of the published profile.")
    ] = None,
    context: Annotated[int, typer.Option(help="Positions of each when it starts.")] = 100_000,
    steps: Annotated[int, typer.Option(help="Timed steps per cell.")] = 24,
    warm: Annotated[int, typer.Option(help="Steps before them.")] = 12,
    layers: Annotated[int | None, typer.Option(help="Only so many layers.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that share the experts.")] = 8,
    hbm_gb: Annotated[float | None, typer.Option(help="Device memory; default: all.")] = None,
    host_gb: Annotated[int, typer.Option(help="Limit of pinned memory, GiB.")] = 98,
    profile: Annotated[int, typer.Option(help="Steps profiled per cell.")] = 2,
    jobs: Annotated[int, typer.Option(help="Programs compiled at the same time.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure the cells, one after the other, over the same weights and host pools."""
    _prepare(host_gb)
    asked = Asked(
        model=model,
        cells=tuple(cells.split(",")),
        loads=tuple(map(int, loads.split(","))),
        context=context,
        plan=Plan(warm, steps, profile),
        layers=layers,
        gpus=gpus,
        survival=_survival(model, layers, gpus, accept_length),
        device_bytes=1e9 * (hbm_gb or _device_gb()),
        host_bytes=host_gb * 2**30 - HOST_SPARE,
    )
    floors, every = _floors(model), planned(asked)
    document: dict[str, Any] = {
        "bench": "decode_gpu",
        **environment(),
        **said(asked, every, floors),
        "memory_gb": {_label(each): _gb(account(each.setup, each.cell)) for each in every},
        "cells": {},
        "sweep": [],
    }
    console.print_json(data={key: document[key] for key in ("executed", "modelled", "memory_gb")})
    bounds = [float(each) for each in tpot_ms.split(",") if each]
    session = Session(asked, every, jobs, _rates(floors), prepared)
    _measure(document, session, bounds, json)
    console.print(table_of(document["sweep"]))
    write(document, json)


def _measure(
    document: dict[str, Any], session: Session, bounds: list[float], json: Path | None
) -> None:
    """Run the cells, and write the result after each."""
    begin, taken = time.perf_counter(), dict[str, float]()
    for each, figures in session.run():
        document["cells"].setdefault(each.cell.name, figures)  # at the first load
        document["sweep"].append(row_of(each.load, each.cell.name, figures))
        document |= {
            "ratios": ratios(document["cells"]),
            "bounds": bounded(document["sweep"], bounds),
            "low_load": compared_with_resident(document["sweep"]),
        }
        taken[_label(each)] = time.perf_counter() - begin
        document["seconds"] = session.seconds | taken
        begin = time.perf_counter()
        save(document, json)
        tell(_label(each), figures)


def _prepare(host_gb: int) -> None:
    """Settings that JAX reads when it starts; what is set already stays."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_gb))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()


def _label(each: Planned) -> str:
    return f"{each.cell.name} at {each.load}"


def _device_gb() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", 8e9)) / 1e9


def _survival(
    model: str, layers: int | None, gpus: int, accept_length: float | None
) -> tuple[float, ...]:
    """The acceptance profile of a model's drafts, or one with another mean."""
    profile = shard_of(model, layers, gpus).survival
    return profile if accept_length is None else survival_for(accept_length, profile)


def _floors(model: str) -> Floors:
    small = {"copy_bytes": 1 << 24, "side": 256} if model.startswith("tiny") else {}
    return measure_floors(5, **small)


def _rates(floors: Floors) -> Rates:
    return Rates(
        hbm=1e9 * floors.hbm_gbps, link=1e9 * floors.h2d_gbps, flops=1e12 * floors.bf16_tflops
    )


def _gb(each: Account) -> dict[str, float]:
    return {kind: round(size / 1e9, 3) for kind, size in each.bytes.items()}


if __name__ == "__main__":
    typer.run(main)
