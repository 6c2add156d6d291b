"""What fits on the GPUs of a deployment, and how fast it is expected to decode.

From sizes alone: the same costs that `bench.decode_gpu` prints as floors (`models.glm.costs`), the
share of them that each stage was measured to reach (`configs.gpus`), and how local the selections
of texts are (`configs.workload`). What goes between GPUs is not counted.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dhisparse_jax.config import HierarchyConfig, Policy, usual_tail
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.configs.gpus import Gpu
from dhisparse_jax.configs.workload import PUBLISHED_SURVIVAL, fetched, tokens_per_step
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft.block import Vocabulary
from dhisparse_jax.models.draft.checkpoint import abstract_model
from dhisparse_jax.models.draft.drafter import drafter_of
from dhisparse_jax.models.draft.glm_drafts import KINDS, draft_config
from dhisparse_jax.models.glm.costs import (
    StepLoad,
    exposed_seconds,
    predicted_seconds,
    step_seconds,
    step_work,
    weight_bytes,
)
from dhisparse_jax.models.glm.decode import geometry_of
from dhisparse_jax.models.glm.memory import Account, Fit, account, fit
from dhisparse_jax.speculation.protocol import NO_DRAFT, Drafter
from dhisparse_jax.speculation.schedule import UNION_GROWTH

DTYPE = "bfloat16"
"""Of the computation."""

HOST_PAGE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is planned for.

    Attributes:
        config: of the model.
        gpu: one of the decode GPUs.
        gpus: how many; attention is data-parallel, and experts are spread over all.
        context: positions of every request.
        concurrency: requests on all of them together.
        draft: "none", or a kind of draft.
        accept_length: tokens per step with it; None: as published.
    """

    config: GlmConfig
    gpu: Gpu
    gpus: int
    context: int
    concurrency: int
    draft: str = "none"
    accept_length: float | None = None

    @property
    def requests(self) -> int:
        """Of the GPU that has most."""
        return math.ceil(self.concurrency / self.gpus)

    @property
    def capacity(self) -> int:
        """Positions of a request, in whole host pages."""
        return math.ceil(self.context / HOST_PAGE) * HOST_PAGE


class Expected(NamedTuple):
    """A decode step.

    Attributes:
        load: what it has to do.
        stages: seconds of each, the whole retrieval among them.
        exposed: seconds of the retrieval that nothing hides.
        floor: seconds that it takes at least.
    """

    load: StepLoad
    stages: dict[str, float]
    exposed: float
    floor: float

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return sum(self.stages.values()) - self.stages["retrieve"] + self.exposed

    @property
    def fetched_share(self) -> float:
        """Of the rows that it selects."""
        return self.load.fetched / self.load.attended


class Planned(NamedTuple):
    """A policy on one GPU.

    Attributes:
        policy: how budgets are set.
        fit: what is on the GPU at the same time; requests beyond it wait.
        memory: of it, or of one request if none fits.
        tokens_per_step: of a request.
        step: that is expected.
    """

    policy: Policy
    fit: Fit
    memory: Account
    tokens_per_step: float
    step: Expected

    @property
    def tpot(self) -> float:
        """Seconds per output token of a request."""
        return self.step.seconds / self.tokens_per_step

    @property
    def tokens_per_s(self) -> float:
        """Output of the GPU."""
        return self.fit.requests / self.tpot


class Draft(NamedTuple):
    """A drafter and the bytes of its weights."""

    drafter: Drafter
    bytes: int


def plan(asked: Deployment) -> list[Planned]:
    """Every policy on one GPU of a deployment.

    Raises:
        UserError: sizes that cannot be, or not one request fits under any policy.
    """
    _check(asked)
    draft = draft_of(asked)
    found = [_planned(asked, draft, policy) for policy in Policy]
    if not any(each.fit.requests for each in found):
        least = min(each.memory.device_bytes for each in found)
        raise UserError(
            f"one request needs {least / 1e9:.1f} GB of device memory on each of {asked.gpus} GPUs "
            f"with {asked.gpu.device_bytes / 1e9:.1f} GB; use more --gpus, or lower --context "
            f"(now {asked.context})"
        )
    return found


def draft_of(asked: Deployment) -> Draft:
    """The draft of a deployment, from shapes."""
    if asked.draft == "none":
        return Draft(NO_DRAFT.drafter, 0)
    config, target = draft_config(asked.draft, asked.config), asked.config
    leaf: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(DTYPE))
    width, size = target.hidden_size, target.vocab_size
    vocabulary = Vocabulary(leaf(size, width), leaf(width, size))
    drafter, params = drafter_of(abstract_model(config, jnp.dtype(DTYPE)), config, vocabulary)
    own = jax.tree.leaves(params["draft"])
    return Draft(drafter, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in own))


def _check(asked: Deployment) -> None:
    config = asked.config
    if asked.draft not in ("none", *KINDS):
        names = ", ".join(("none", *KINDS))
        raise UserError(f"there are no sizes of a draft {asked.draft!r}; use one of {names}")
    if config.num_experts % asked.gpus:
        raise UserError(
            f"{config.num_experts} experts cannot be spread evenly over {asked.gpus} GPUs; use a "
            f"divisor of {config.num_experts} as --gpus"
        )
    if not config.index_top_k <= asked.context <= config.context:
        raise UserError(
            f"a context of {asked.context} positions is not in the model's range "
            f"{config.index_top_k} to {config.context}; change --context"
        )
    most = 1 if asked.draft == "none" else draft_config(asked.draft, config).length + 1
    if asked.accept_length is not None and most == 1:
        raise UserError("--accept-length is of a draft: name one with --draft")
    if asked.accept_length is not None and not 1 <= asked.accept_length <= most:
        raise UserError(
            f"a step verifies {most} tokens at most, so {asked.accept_length:g} per step are not "
            f"possible; give an --accept-length from 1 to {most}"
        )


def _planned(asked: Deployment, draft: Draft, policy: Policy) -> Planned:
    config, experts = asked.config, asked.config.num_experts // asked.gpus
    queries = draft.drafter.length + 1
    sized = lambda fit: hierarchy_of(asked, policy, fit, queries)
    weights = weight_bytes(config, experts)
    held = lambda fit: account(weights, config.vocab_size, sized(fit), draft.drafter, draft.bytes)
    limit = asked.gpu.device_bytes
    fits = lambda fit: held(fit).device_bytes <= limit
    found = fit(policy, asked.requests, asked.capacity, config.index_top_k, queries, fits)
    some = found._replace(requests=max(1, found.requests))
    tokens = _tokens_per_step(asked, draft)
    return Planned(
        policy=policy,
        fit=found,
        memory=held(some),
        tokens_per_step=tokens,
        step=expected(
            config, experts, sized(some), asked.context, tokens, draft.bytes, gpu=asked.gpu
        ),
    )


def expected(
    config: GlmConfig,
    experts: int,
    cfg: HierarchyConfig,
    context: int,
    tokens: float,
    draft_bytes: int,
    *,
    gpu: Gpu,
) -> Expected:
    """The step of texts as local as published ones; see `costs.step_work` and `step_load`."""
    load = step_load(config, cfg, context, tokens)
    work = step_work(config, experts, cfg, load, draft_bytes)
    stages = predicted_seconds(config, work, load, gpu.rates, gpu.speeds)
    exposed = exposed_seconds(config, load, stages)
    return Expected(load, stages, exposed, step_seconds(work, gpu.rates))


def hierarchy_of(asked: Deployment, policy: Policy, fit: Fit, queries: int) -> HierarchyConfig:
    """Sizes of the hierarchy; host memory has all requests, those that wait too."""
    return HierarchyConfig(
        geometry=geometry_of(asked.config, DTYPE),
        policy=policy,
        requests=fit.requests,
        capacity=asked.capacity,
        queries=queries,
        hot_rows=fit.hot_rows,
        tail=usual_tail(queries),
        host_page=HOST_PAGE,
        host_pages=asked.requests * (asked.capacity // HOST_PAGE),
    )


def _tokens_per_step(asked: Deployment, draft: Draft) -> float:
    if asked.accept_length is not None:
        return asked.accept_length
    return tokens_per_step(PUBLISHED_SURVIVAL[: draft.drafter.length])


def step_load(config: GlmConfig, cfg: HierarchyConfig, context: int, tokens: float) -> StepLoad:
    """What a step has to do for texts as local as published ones.

    Args:
        config: of the model.
        cfg: sizes of the hierarchy.
        context: positions of every request.
        tokens: accepted per step and request.
    """
    k = config.index_top_k
    union = cfg.queries**UNION_GROWTH
    budget, history = cfg.hot_slots(0) / k, context / k
    resident = cfg.policy is Policy.RESIDENT
    return StepLoad(
        requests=cfg.requests,
        queries=cfg.queries,
        context=context,
        attended=k * min(union, history),
        fetched=0.0 if resident else k * fetched(budget, history, union, tokens),
    )
