"""What a decode step of DeepSeek-V4.1 must move and multiply on one GPU, counted from shapes.

One of several decode GPUs with data-parallel attention and expert parallelism (`models.share`): it
has the routed experts that are here, and gets the tokens of all for them. What goes between GPUs is
not counted. See `models.glm.costs` for how stages follow each other.
"""

import math
import re
from typing import Any, NamedTuple

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.models.glm.costs import StepLoad, Work
from dhisparse_jax.models.share import Named

F32 = 4

LOOKED_UP = "markov_w1"
"""A table of the drafter, of which only rows are read."""

_STAGES = {
    r"\.mlp\.stored\.": "experts",
    r"\.mlp\.shared\.": "shared expert",
    r"\.mlp\.router$": "router",
    r"\.attention\.(indexer|source)": "indexer",
    r"\.attention(\.|$)": "attention weights",
    r"_hyper$": "streams",
    r"\.engram\.table$": "n-gram tables",
    r"\.engram": "n-grams",
    r"^(head|norm)$": "head",
    r"_norm$": "norms",
}
"""Stage of a module's weights, by its name: the first that fits."""


class Drafted(NamedTuple):
    """What proposes: its sizes, and shapes of the weights that are here."""

    config: AttachedConfig
    shapes: Named


class Weighed(NamedTuple):
    """Weights of a stage.

    Attributes:
        bytes: as they are stored, scales included.
        count: numbers that are multiplied with, of matrices; of packed ones both in a byte.
    """

    bytes: int
    count: int


def stage_of(module: str) -> str:
    """Stage of the weights of a module."""
    return next((stage for form, stage in _STAGES.items() if re.search(form, module)), "embedding")


def weighed(shapes: Named) -> dict[str, Weighed]:
    """All weights by stage."""
    found: dict[str, Weighed] = {}
    for module, leaves in shapes.items():
        for name, leaf in leaves.items():
            before = found.get(stage_of(module), Weighed(0, 0))
            size, count = math.prod(leaf.shape) * leaf.dtype.itemsize, _numbers(name, leaf)
            found[stage_of(module)] = Weighed(before.bytes + size, before.count + count)
    return found


def _numbers(name: str, leaf: Any) -> int:  # noqa: ANN401  # a shape
    if name in ("scale", "scales") or len(leaf.shape) < 2:
        return 0
    return math.prod(leaf.shape) * (2 if leaf.dtype.name == "uint8" else 1)


def step_work(
    config: V41Config,
    shapes: Named,
    cfg: HierarchyConfig,
    load: StepLoad,
    draft: Drafted | None = None,
) -> dict[str, Work]:
    """What a step must do, by stage.

    Of the weights, all but tables are read once. Streams are read and written at every sublayer.
    Scores are written once and read once; selections that choose from candidates read these alone.

    Args:
        config: sizes of the model.
        shapes: of the weights that are here.
        cfg: sizes of the hierarchy.
        load: of the step.
        draft: what proposes; it reads the head once more.
    """
    found, tokens = weighed(shapes), load.requests * load.queries
    each = lambda stage: Work(found[stage].bytes, 2.0 * tokens * found[stage].count)
    gated = 6.0 * config.hidden_size * config.expert_intermediate_size
    picks = tokens * config.experts_per_token * config.num_layers
    streams = 2 * 2 * config.num_layers * tokens * config.streams * config.hidden_size * 2
    scored, again = scored_records(config, cfg, load.context)
    index = 2.0 * config.index_heads * config.index_dim
    far = sum(rate > 0 for rate in config.rates)
    row, window = 4 * cfg.geometry.row.words, load.queries - 1 + config.window
    attended = far * config.index_top_k + config.num_layers * config.window
    work = {
        "experts": Work(found["experts"].bytes, picks * gated),
        **{stage: each(stage) for stage in ("attention weights", "shared expert", "indexer")},
        "router": each("router"),
        "streams": each("streams")._replace(hbm_bytes=found["streams"].bytes + streams),
        "index": Work(
            load.requests * (scored + again) * cfg.geometry.key_bytes
            + tokens * (scored + again) * F32,
            tokens * (scored + again) * index,
        ),
        "top-K": Work(tokens * (scored + again) * F32),
        "attend": Work(
            load.requests * row * (far * load.attended + config.num_layers * window),
            4.0 * tokens * attended * config.num_heads * config.head_dim,
        ),
        "retrieve": Work(link_bytes=load.requests * load.fetched * _record_bytes(cfg)),
        "head": each("head"),
    }
    if "n-grams" in found:
        work["n-grams"] = each("n-grams")
    if draft:
        work["draft"] = _draft_work(config, draft, load, found["head"])
    return work


def _draft_work(config: V41Config, draft: Drafted, load: StepLoad, head: Weighed) -> Work:
    """A block for each request, its experts on those that tokens of all GPUs send here."""
    read = {name: own for name, own in draft.shapes.items() if not name.endswith(LOOKED_UP)}
    own, rows = weighed(read), load.requests * draft.config.block_size
    dense = sum(each.count for stage, each in own.items() if stage != "experts")
    gated = 6.0 * config.hidden_size * config.expert_intermediate_size
    picks = rows * draft.config.experts_per_token * draft.config.stages
    size = head.bytes + sum(each.bytes for each in own.values())
    return Work(size, 2.0 * rows * (dense + head.count) + picks * gated)


def scored_records(config: V41Config, cfg: HierarchyConfig, context: int) -> tuple[float, float]:
    """Records of a request that a query scores: by first selections, and by those that follow."""
    rates = [cfg.geometry.rate(pool) for pool in range(cfg.pools)]
    first = sum(context / rate for rate in rates)
    others = len(config.index_sources) - len(config.entry_sources)
    candidates = min(context / rates[-1], config.candidate_blocks * config.candidate_block)
    return first, float(others * candidates)


def _record_bytes(cfg: HierarchyConfig) -> int:
    """Bytes of a record of every pool together."""
    return sum(cfg.record_bytes(pool) for pool in range(cfg.pools))
