"""The model's part of a decode step: T verify queries of every request through all layers."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.group import (
    OpenGroup,
    attend,
    close_group,
    open_group,
    select_again,
)
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.hierarchy.update import with_pool
from dhisparse_jax.model import Beside, Params, ServedModel, Taps, layers_of, places_of


def forward(
    model: ServedModel,
    cfg: HierarchyConfig,
    params: Params,
    state: HierarchyState,
    tokens: Int[Array, "R T"],
    *,
    live: Int[Array, " R"] | None = None,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "R T V"], Float[Array, "R T taps"], HierarchyState]:
    """Run T verify queries of every request through the model; nothing is committed.

    Args:
        model: the served model.
        cfg: sizes of the hierarchy.
        params: weights.
        state: the hierarchy.
        tokens: int32 tokens at positions `length` .. `length + T - 1`.
        live: int32 how many queries of each request count, 0..T; None: all. The others fetch
            nothing, and their logits mean nothing. A request without any is not touched: it may be
            one whose prompt is still being prefilled.
        taps: layers, from 0, that a drafter reads.

    Returns:
        Logits, what is read of the tapped layers side by side, and the hierarchy.
    """
    positions, active = query_positions(state, cfg), state.active
    if live is not None:
        state = dataclasses.replace(state, active=active & (live > 0))
    with jax.named_scope("embed"):
        x = model.embed(params, tokens)
    tapped: dict[int, Float[Array, "R T width"]] = {}
    for pool in range(cfg.pools):
        places = places_of(cfg.geometry, pool, taps)
        with jax.named_scope(f"group_{pool}"):
            x, here, state = decode_group(
                model, cfg, params, state, pool, x, tokens, positions, live, places
            )
        tapped |= zip(layers_of(cfg.geometry, pool, places), here, strict=True)
    with jax.named_scope("verify"):
        features = jnp.concatenate([x[..., :0], *(tapped[layer] for layer in taps)], axis=-1)
        return model.logits(params, x), features, dataclasses.replace(state, active=active)


def decode_group(  # noqa: PLR0913  # a step's inputs, all of them
    model: ServedModel,
    cfg: HierarchyConfig,
    params: Params,
    state: HierarchyState,
    pool: int,
    x: Float[Array, "R T D"],
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    live: Int[Array, " R"] | None,
    places: tuple[int, ...],
) -> tuple[Float[Array, "R T D"], Taps, HierarchyState]:
    """Run the layers of one selection group.

    Args:
        model: the served model.
        cfg: sizes of the hierarchy.
        params: weights.
        state: the hierarchy, where only requests with a live query are active.
        pool: which group.
        x: the residual stream.
        tokens: int32 tokens of the queries.
        positions: int32 their positions.
        live: as in `forward`.
        places: which layers of the group a drafter reads, from 0.

    Returns:
        The residual stream, that after the layers of `places`, and the hierarchy.
    """

    def open_it(index: IndexInputs, opened: OpenGroup | None = None) -> OpenGroup:
        if opened is None:
            return open_group(state, cfg, pool, index, live)
        return select_again(opened, cfg, pool, index, live)

    def attend_it(
        group: OpenGroup,
        layer: int,
        row: Float[Array, "R E width"] | None,
        query: Float[Array, "R T H width"],
    ) -> tuple[Attended, OpenGroup]:
        return attend(group, cfg, pool, layer, row, query)

    beside = Beside(tokens=tokens, kept=state.pools[pool].kept, writes=state.active)
    ran = model.run_group(params, pool, x, positions, open_it, attend_it, places, beside)
    state = with_pool(close_group(ran.opened, cfg, pool), pool, kept=ran.kept)
    return ran.x, ran.taps, state
