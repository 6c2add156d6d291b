"""What timed steps of a cell did, beside the least they must take and what was expected."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.shard_cells import Cell
from bench.shard_load import Loaded
from dhisparse_jax.configs.gpus import Rates
from dhisparse_jax.models.glm.costs import StepLoad, stage_seconds, step_seconds
from dhisparse_jax.step import StepOutput

TOGETHER = "retrieve and attend"

MOST = 1.1
"""Share of a floor that measurement may show: copies are not the fastest reads."""


def figures_of(
    loaded: Loaded,
    cell: Cell,
    outputs: Sequence[StepOutput],
    seconds: float,
    history: int,
    rates: Rates,
) -> dict[str, Any]:
    """What the timed steps did, beside the least that they must take."""
    setup, cfg = loaded.setup, loaded.setup.config(cell)
    model, config = setup.model, setup.model.config
    steps = len(outputs)
    tokens = sum(int(output.count.sum()) for output in outputs)
    # Of a selection; a pool counts all that are made from its records.
    each = cfg.pools / sum(model.selections)
    selected = each * np.mean([output.records.selected for output in outputs])
    staged = each * np.mean([output.records.staged for output in outputs])
    fetched = np.mean([output.records.fetched[0] for output in outputs], axis=0)
    words = np.asarray([cfg.record_words(pool) for pool in range(cfg.pools)])
    link = 4.0 * float((fetched.sum(axis=1) * words).sum())
    load = StepLoad(
        requests=cell.requests,
        queries=cfg.queries,
        context=history,
        attended=float(selected),
        fetched=float(fetched.mean()),
    )
    work = model.step_work(cfg, load, loaded.draft_bytes)
    floor = step_seconds(work, rates)
    step = seconds / steps
    at_mean = model.published_tokens if setup.drafter.length else 1.0
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_at_published_mean": cell.requests * at_mean / step,
        "tpot_ms": 1e3 * seconds * cell.requests / tokens,
        "step_ms": 1e3 * step,
        "steps": steps,
        "tokens_per_step": tokens / steps / cell.requests,
        "union": float(selected) / config.index_top_k,
        "fetched_per_k": each * float(fetched.mean()) / config.index_top_k,
        "fetched_share": each * float(fetched.mean()) / float(selected),
        "staged_share": float(staged / selected),
        "link_gb_per_step": link / 1e9,
        "floor_ms": 1e3 * floor,
        "floor_ratio": step / floor,
        "floor_stages_ms": {s: 1e3 * t for s, t in stage_seconds(work, rates).items()},
        "expected": model.expected(
            cfg, history, tokens / steps / cell.requests, loaded.draft_bytes, step
        ),
    }


def reached(floors: Mapping[str, float], stages: Mapping[str, float]) -> dict[str, float]:
    """Share of its floor's rate that each stage reached: what belongs into `configs.gpus`.

    Retrieval and attention that run in one kernel have one share: the longer of their floors, over
    all that both take. What looks faster than its floor had kernels that the profile calls after
    nothing, so it is left out.
    """
    both = ("attend", "retrieve")
    if TOGETHER in stages:
        apart = lambda every: {name: each for name, each in every.items() if name not in both}
        floors = {**apart(floors), TOGETHER: max(floors.get(name, 0.0) for name in both)}
        whole = stages[TOGETHER] + sum(stages.get(name, 0.0) for name in both)
        stages = {**apart(stages), TOGETHER: whole}
    return {
        stage: floor / stages[stage]
        for stage, floor in floors.items()
        if floor and floor < MOST * stages.get(stage, 0.0)
    }
