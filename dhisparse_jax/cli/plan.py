"""`dhisparse plan`: what fits on a deployment's GPUs, and how fast it is expected to decode."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dhisparse_jax.cli import plan_options as own
from dhisparse_jax.cli.options import NO_DRAFT
from dhisparse_jax.cli.report import on_standard_output, output_files
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dhisparse_jax.models.glm.planner import Deployment, Planned

MIB = 2**20
NOTHING = "-"


CAVEAT = (
    "Sizes are per GPU. Expected from bytes and flops at the speeds of configs/gpus.py, some of "
    "them assumed, with the published locality of GLM-5.1. Within 7 % of the five measured steps "
    "that the speeds are from, of GLM-5.3 on an H200, and 16 % of four with few requests."
)


def plan(
    model: own.PlannedModel = "glm-5.3",
    gpu: own.GpuName = "h200",
    gpus: own.Gpus = 8,
    context: own.Context = 100_000,
    concurrency: own.Concurrency = 128,
    draft: own.PlannedDraft = NO_DRAFT,
    accept_length: own.AcceptLength = None,
    json: own.PlanJson = None,
) -> None:
    """Say what fits on the GPUs of a deployment, and how fast each policy is expected to be.

    From sizes alone, on any machine: bytes of one GPU by kind, then a step by stage. Attention is
    data-parallel, experts are spread over all GPUs, and what goes between GPUs is not counted.
    """
    from dhisparse_jax.configs import GLM_PRESETS
    from dhisparse_jax.configs.gpus import GPUS
    from dhisparse_jax.models.glm import planner

    asked = planner.Deployment(
        config=_named("model", model, GLM_PRESETS),
        gpu=_named("gpu", gpu, GPUS),
        gpus=gpus,
        context=context,
        concurrency=concurrency,
        draft=draft,
        accept_length=accept_length,
    )
    with output_files({"--json": json}, []) as (output,):
        found = planner.plan(asked)
        console = Console(highlight=False, soft_wrap=True, stderr=on_standard_output(output))
        console.print(_head(asked, model, gpu), markup=False)
        for title, rows in (("What fits", _fits), ("GB of device memory", _bytes)):
            console.print(_table(title, found, rows(asked, found)))
        console.print(_table("ms of a step, expected", found, _stages(found)))
        console.print(_table("Expected", found, _speed(found)))
        console.print(CAVEAT, markup=False)
        if output:
            output.write(document(asked, model, gpu, found))


def _named(option: str, name: str, known: "Mapping[str, Any]") -> Any:  # noqa: ANN401
    if name not in known:
        raise UserError(f"--{option} {name} has no known sizes; use one of {', '.join(known)}")
    return known[name]


def document(asked: "Deployment", model: str, gpu: str, found: "list[Planned]") -> dict[str, Any]:
    """The JSON object of a plan. Sizes in bytes; speed is null where nothing fits."""
    return {
        "model": model,
        "gpu": gpu,
        "gpus": asked.gpus,
        "context": asked.context,
        "concurrency": asked.concurrency,
        "draft": asked.draft,
        "requests_per_gpu": asked.requests,
        "gpu_bytes": asked.gpu.device_bytes,
        "policies": {each.policy.value: _document(asked, each) for each in found},
    }


def _document(asked: "Deployment", each: "Planned") -> dict[str, Any]:
    fits = each.fit.requests > 0
    return {
        "requests": each.fit.requests,
        "waiting": asked.requests - each.fit.requests,
        "hot_rows": each.fit.hot_rows,
        "bytes": each.memory.bytes,
        "device_bytes": each.memory.device_bytes,
        "host_bytes": each.memory.host_bytes,
        "fetched_share": each.step.fetched_share,
        "tokens_per_step": each.tokens_per_step,
        "stages_ms": {stage: 1e3 * seconds for stage, seconds in each.step.stages.items()},
        "exposed_ms": 1e3 * each.step.exposed,
        "step_ms": 1e3 * each.step.seconds if fits else None,
        "floor_ms": 1e3 * each.step.floor if fits else None,
        "tpot_ms": 1e3 * each.tpot if fits else None,
        "tokens_per_s": each.tokens_per_s if fits else None,
    }


def _head(asked: "Deployment", model: str, gpu: str) -> str:
    return (
        f"{model}, {asked.concurrency} requests of {asked.context:,} positions on {asked.gpus} "
        f"{gpu}, draft {asked.draft}: {asked.requests} requests and "
        f"{asked.gpu.device_bytes / 1e9:.1f} GB each"
    )


Rows = list[tuple[str, list[str]]]


def _table(title: str, found: "list[Planned]", rows: Rows) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", style="cyan", no_wrap=True)
    for each in found:
        table.add_column(each.policy.value, justify="right")
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _fits(asked: "Deployment", found: "list[Planned]") -> Rows:
    return [
        ("requests that run", [f"{each.fit.requests}" for each in found]),
        ("requests that wait", [f"{asked.requests - each.fit.requests}" for each in found]),
        ("hot rows per pool", [f"{each.fit.hot_rows:,}" for each in found]),
        ("GB of host memory", [f"{each.memory.host_bytes / 1e9:.1f}" for each in found]),
    ]


def _bytes(_: "Deployment", found: "list[Planned]") -> Rows:
    """Kinds of at least a MiB somewhere."""
    kinds = [
        kind for kind in found[0].memory.bytes if any(e.memory.bytes[kind] >= MIB for e in found)
    ]
    size = lambda count: f"{count / 1e9:.2f}"
    rows = [(kind, [size(each.memory.bytes[kind]) for each in found]) for kind in kinds]
    return [*rows, ("all", [size(each.memory.device_bytes) for each in found])]


def _stages(found: "list[Planned]") -> Rows:
    rows = [
        (
            stage,
            _where_it_fits(found, lambda each, stage=stage: f"{1e3 * each.step.stages[stage]:.2f}"),
        )
        for stage in found[0].step.stages
    ]
    exposed = _where_it_fits(found, lambda each: f"{1e3 * each.step.exposed:.2f}")
    return [*rows, ("  of retrieve, exposed", exposed)]


def _speed(found: "list[Planned]") -> Rows:
    shown: list[tuple[str, Callable[[Planned], str]]] = [
        ("fetched share of a selection", lambda each: f"{each.step.fetched_share:.1%}"),
        ("tokens per step and request", lambda each: f"{each.tokens_per_step:.2f}"),
        ("ms per step", lambda each: f"{1e3 * each.step.seconds:.1f}"),
        ("  at least, by bytes and flops", lambda each: f"{1e3 * each.step.floor:.1f}"),
        ("ms per output token", lambda each: f"{1e3 * each.tpot:.1f}"),
        ("tokens/s per GPU", lambda each: f"{each.tokens_per_s:.0f}"),
    ]
    return [(name, _where_it_fits(found, text)) for name, text in shown]


def _where_it_fits(found: "list[Planned]", text: "Callable[[Planned], str]") -> list[str]:
    return [text(each) if each.fit.requests else NOTHING for each in found]
