"""One decode step. Reads top to bottom as the design; the stage names are those of a profile."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.adapt import adapt
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.backup import backup
from dhisparse_jax.hierarchy.commit import commit
from dhisparse_jax.hierarchy.group import OpenGroup, attend, close_group, open_group
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.sampling import Sampler, choose
from pallas_kernels.plan.types import PlanCounts


@pytree
class StepOutput:
    """What a step tells the host.

    Attributes:
        tokens: int32 next token of every request; undefined for inactive ones.
        counts: records per pool and request.
    """

    tokens: Int[Array, " R"]
    counts: PlanCounts


def decode_step(
    model: ServedModel,
    cfg: HierarchyConfig,
    params: Params,
    state: HierarchyState,
    tokens: Int[Array, " R"],
    sampler: Sampler,
) -> tuple[StepOutput, HierarchyState]:
    """Read one token of every request, write its rows, and choose the next token.

    Args:
        model: the served model; static.
        cfg: sizes of the hierarchy, with one verify query; static.
        params: weights.
        state: the hierarchy; donate it.
        tokens: int32 last token of every request, at position `length`.
        sampler: how each request chooses.
    """
    logits, state = forward(model, cfg, params, state, tokens[:, None])
    with jax.named_scope("accept"):
        accepted = jnp.ones_like(state.length)
        chosen = choose(logits[:, 0], sampler, state.length + accepted)
    state = finish_step(state, cfg, accepted)
    return StepOutput(tokens=chosen, counts=state.counts), state


def forward(
    model: ServedModel,
    cfg: HierarchyConfig,
    params: Params,
    state: HierarchyState,
    tokens: Int[Array, "R T"],
) -> tuple[Float[Array, "R T V"], HierarchyState]:
    """Run T verify queries of every request through the model; nothing is committed."""
    positions = query_positions(state, cfg)
    with jax.named_scope("embed"):
        x = model.embed(params, tokens)
    for pool in range(cfg.pools):
        with jax.named_scope(f"group_{pool}"):
            x, state = _decode_group(model, cfg, params, state, pool, x, positions)
    with jax.named_scope("verify"):
        return model.logits(params, x), state


def finish_step(
    state: HierarchyState, cfg: HierarchyConfig, accepted: Int[Array, " R"]
) -> HierarchyState:
    """Commit the accepted positions, back their records up, and set the next budgets."""
    start = state.length
    with jax.named_scope("commit"):
        state = commit(state, accepted)
    with jax.named_scope("backup"):
        state = backup(state, cfg, start)
    with jax.named_scope("adapt"):
        return adapt(state, cfg)


def _decode_group(
    model: ServedModel,
    cfg: HierarchyConfig,
    params: Params,
    state: HierarchyState,
    pool: int,
    x: Float[Array, "R T D"],
    positions: Int[Array, "R T"],
) -> tuple[Float[Array, "R T D"], HierarchyState]:
    open_it = partial(open_group, state, cfg, pool)

    def attend_it(
        group: OpenGroup,
        layer: int,
        row: Float[Array, "R T width"],
        query: Float[Array, "R T H width"],
    ) -> tuple[Float[Array, "R T H value"], OpenGroup]:
        return attend(group, cfg, pool, layer, row, query)

    x, group = model.run_group(params, pool, x, positions, open_it, attend_it)
    return x, close_group(group, cfg, pool)
