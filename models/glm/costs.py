"""What a decode step of GLM-5.x must move and multiply on one GPU, counted from sizes.

One of `gpus` decode GPUs with data-parallel attention and expert parallelism: everything whole but
the routed experts, of which it has its part, and to which it gets the tokens of all. Matrices are
fp8 with a float32 scale per output channel; embedding, head, router, the indexer's head weights and
norms are bfloat16. What goes between GPUs is not counted.

A stage takes at least as long as its bytes at the memory's bandwidth, or its multiplications at the
peak, whichever is longer; stages follow each other. The link works beside them. Peaks are those of
bfloat16. Matrix units multiply twice as many fp8 numbers, so products in which both sides are fp8
count half.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.configs.gpus import Rates, Speed

BF16, F32 = 2, 4

FP8 = 0.5
"""Of the time of a bfloat16 product."""


class Work(NamedTuple):
    """Of a stage.

    Attributes:
        hbm_bytes: read from device memory.
        flops: multiplications and additions, as many of bfloat16 as take the same time.
        link_bytes: read from host memory.
    """

    hbm_bytes: float = 0.0
    flops: float = 0.0
    link_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLoad:
    """What a step has to do.

    Attributes:
        requests: of this GPU.
        queries: per request.
        context: positions of each request.
        attended: distinct rows that one selection of a request has, on average.
        fetched: records that a request fetches in each pool, on average.
    """

    requests: int
    queries: int
    context: int
    attended: float
    fetched: float


def matrix_bytes(fan_in: int, fan_out: int, several: int = 1) -> int:
    """fp8 numbers and a scale for each output channel."""
    return several * fan_out * (fan_in + F32)


def weight_bytes(config: GlmConfig, experts: int) -> dict[str, int]:
    """Bytes of the weights by stage, with so many routed experts per layer on this GPU."""
    width, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    layers, dense = config.num_layers, config.num_dense_layers
    sparse = layers - dense
    attention = (
        matrix_bytes(width, config.q_lora_rank + config.row_dim)
        + matrix_bytes(config.q_lora_rank, heads * config.qk_dim)
        + matrix_bytes(config.qk_nope_dim, latent, heads)
        + matrix_bytes(latent, config.v_dim, heads)
        + matrix_bytes(heads * config.v_dim, width)
    )
    index_heads, index = config.index_heads, config.index_dim
    indexer = matrix_bytes(config.q_lora_rank, index_heads * index) + matrix_bytes(width, index)
    indexer += BF16 * (index_heads * width + 2 * index)
    norms = BF16 * (2 * width + config.q_lora_rank + latent)
    inner, shared = config.expert_intermediate_size, config.num_shared_experts
    vocabulary = BF16 * config.vocab_size * width
    return {
        "experts": sparse * gated_bytes(width, inner, experts),
        "attention weights": layers * attention,
        "shared expert": sparse * gated_bytes(width, shared * inner),
        "dense layers": dense * gated_bytes(width, config.dense_intermediate_size),
        "router": sparse * config.num_experts * (BF16 * width + F32),
        "indexer": len(config.groups) * indexer,
        "norms": layers * norms + BF16 * width,
        "head": vocabulary,
        "embedding": vocabulary,
    }


def gated_bytes(width: int, inner: int, several: int = 1) -> int:
    """Gate, up and down."""
    return matrix_bytes(width, 2 * inner, several) + matrix_bytes(inner, width, several)


def step_work(
    config: GlmConfig, experts: int, cfg: HierarchyConfig, load: StepLoad, draft_bytes: int = 0
) -> dict[str, Work]:
    """What a step must do, by stage.

    Args:
        config: sizes of the model.
        experts: routed experts per layer on this GPU.
        cfg: sizes of the hierarchy.
        load: of the step.
        draft_bytes: weights of the draft; it reads the head once more.
    """
    weights = weight_bytes(config, experts)
    tokens = load.requests * load.queries
    each = lambda stage: Work(weights[stage], FP8 * 2.0 * tokens * weights[stage])
    gated = 6.0 * config.hidden_size * config.expert_intermediate_size
    sparse = config.num_layers - config.num_dense_layers
    pools, row = cfg.pools, 4 * cfg.geometry.row.words
    scores = load.requests * load.context * pools
    head = Work(weights["head"], tokens * weights["head"])
    rows = load.requests * config.num_layers * load.attended
    products = config.num_heads * (config.row_dim + config.kv_lora_rank)
    picks = tokens * config.experts_per_token
    work = {
        "experts": Work(weights["experts"], FP8 * picks * sparse * gated),
        **{stage: each(stage) for stage in ("attention weights", "shared expert", "dense layers")},
        "router": Work(weights["router"], tokens * weights["router"]),
        "indexer": Work(weights["indexer"], FP8 * 2.0 * tokens * weights["indexer"]),
        "index": Work(
            scores * cfg.geometry.key_bytes,
            2.0 * scores * load.queries * config.index_heads * config.index_dim,
        ),
        "attend": Work(
            rows * row, 2.0 * tokens * config.num_layers * config.index_top_k * products
        ),
        "retrieve": Work(link_bytes=load.requests * load.fetched * _record_bytes(cfg)),
        "head": head,
    }
    if draft_bytes:
        work["draft"] = Work(draft_bytes + head.hbm_bytes, tokens * draft_bytes + head.flops)
    return work


def _record_bytes(cfg: HierarchyConfig) -> int:
    """Bytes of a record of every pool together."""
    return sum(cfg.record_bytes(pool) for pool in range(cfg.pools))


def stage_seconds(work: Mapping[str, Work], rates: Rates) -> dict[str, float]:
    """The least that each stage takes."""
    return {
        stage: max(
            each.hbm_bytes / rates.hbm, each.flops / rates.flops, each.link_bytes / rates.link
        )
        for stage, each in work.items()
    }


def step_seconds(work: Mapping[str, Work], rates: Rates) -> float:
    """The least that a step takes: all stages but the link's, or the link."""
    seconds = stage_seconds(work, rates)
    link = sum(seconds[stage] for stage, each in work.items() if each.link_bytes)
    return max(link, sum(seconds.values()) - link)


def predicted_seconds(
    config: GlmConfig,
    work: Mapping[str, Work],
    load: StepLoad,
    rates: Rates,
    speeds: Mapping[str, Speed],
) -> dict[str, float]:
    """What each stage is expected to take: its floor at the share it reaches, and its calls.

    Stages without a floor are there too: `plan`, `top-K`, and `rest`, what lies between the others.
    """
    floors = stage_seconds(work, rates)
    pools, layers = len(config.groups), config.num_layers
    calls = dict.fromkeys(("plan", "top-K", "index", "indexer", "retrieve"), pools)
    calls |= dict.fromkeys(("attention weights", "shared expert", "experts", "router"), layers)
    calls |= {"attend": layers, "rest": layers, "draft": 1}
    tokens = load.requests * load.queries
    found = {}
    for stage in [*floors, "top-K", "plan", "rest"]:
        speed = speeds[stage]
        each = speed.call_us + tokens * speed.token_us
        found[stage] = floors.get(stage, 0.0) / speed.share + 1e-6 * calls.get(stage, 0) * each
    if not load.fetched:
        found["retrieve"] = 0.0
    return found


def exposed_seconds(config: GlmConfig, load: StepLoad, seconds: Mapping[str, float]) -> float:
    """Time of the retrieval that nothing hides.

    With one query per request, the first layer of a group attends in the same launch. With several,
    attention follows.
    """
    beside = len(config.groups) / config.num_layers * seconds["attend"] if load.queries == 1 else 0
    return max(0.0, seconds["retrieve"] - beside)
