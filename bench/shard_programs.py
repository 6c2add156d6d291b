"""The programs of a decode step in pieces: what asks, what runs a group, what settles.

They are the library's functions. A group's program is that of the first pool of its kind: it sees
the rows of another pool in that pool's place, and where that one's tails lie is a number that it is
given.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from bench.shard_protocol import Shard
from bench.shard_replay import Replay, ShardParams, as_that_of
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.output import Packed, packed
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.state import HierarchyState, HotPool, PoolState
from dhisparse_jax.hierarchy.update import with_row
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.speculation.schedule import Profile
from dhisparse_jax.step import Asked, DecodeState, Speculation, ask, settle
from dhisparse_jax.verify import decode_group

Place = Int[Array, ""]

ROWS = ("benefit", "counts", "hot_records", "selection")
"""Leaves of a hierarchy, or trees of them, that have a row for every pool and change in a group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneOfItsKind(HierarchyConfig):
    """The sizes of a hierarchy, seen from a pool that stands for others.

    Attributes:
        member: place of the pool meant among those of its hot pool.
    """

    member: Any

    @override
    def hot_pool_of(self, pool: int) -> tuple[int, Any]:
        """See `HierarchyConfig.hot_pool_of`."""
        return super().hot_pool_of(pool)[0], self.member


@pytree
class Parts:
    """What the program of a group changes in place; donate it.

    Attributes:
        pool: the pool.
        hot: its hot pool.
        rows: what the hierarchy has of every pool, by name: a row each.
        step: its clock.
    """

    pool: PoolState
    hot: HotPool
    rows: dict[str, Any]
    step: Int[Array, ""]


@pytree
class Between:
    """What the programs of a step hand on; those of the next step put theirs in its place.

    A GPU keeps the kernels of a program as a graph, and the host has to tell every kernel of it
    when its operands have moved. So nothing moves: what a program makes takes the place of what it
    made in the step before, which it is given for that.

    Attributes:
        asked: by the first program.
        x: hidden states, of each program in turn.
        taps: of the groups that the drafter reads, by pool.
    """

    asked: Asked
    x: Float[Array, "R T D"]
    taps: tuple[tuple[Float[Array, "R T D"], ...], ...]


def begin(
    model: Shard,
    speculation: Speculation,
    cfg: HierarchyConfig,
    params: ShardParams,
    draft_params: Any,  # noqa: ANN401
    profile: Profile,
    state: DecodeState,
    _: tuple[Asked, Float[Array, "R T D"]],
) -> tuple[Asked, Float[Array, "R T D"]]:
    """Ask, and embed, in the place of what is donated."""
    asked = ask(speculation, cfg, draft_params, profile, state)
    with jax.named_scope("embed"):
        return asked, model.embed(params, asked.block)


def group(  # noqa: PLR0913  # what jit binds, and what it is called with
    model: Shard,
    cfg: HierarchyConfig,
    stands: int,
    places: tuple[int, ...],
    weights: Any,  # noqa: ANN401
    replay: Replay,
    where: tuple[Place, Place],
    block: Int[Array, "R T"],
    live: Int[Array, " R"],
    rest: HierarchyState,
    x: Float[Array, "R T D"],
    _: tuple[Float[Array, "R T D"], ...],
    parts: Parts,
) -> tuple[Float[Array, "R T D"], tuple[Float[Array, "R T D"], ...], Parts]:
    """The group of pool `where[0]`, which is `where[1]` in its hot pool, as that of `stands`.

    Drafters read the layers at `places` of it. Results take the place of what is donated: `x`, the
    hidden states there of the step before, and `parts`.
    """
    pool, member = where
    sizes = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    view = OneOfItsKind(**sizes, member=member)
    number = cfg.hot_pool_of(stands)[0]
    state = dataclasses.replace(
        rest,
        **jax.tree.map(lambda leaf: with_row(leaf, stands, leaf[pool]), parts.rows),
        step=parts.step,
        pools=_alone(parts.pool, stands),
        hot=_alone(parts.hot, number),
        active=rest.active & (live > 0),
    )
    params = ShardParams(weights=weights, replay=as_that_of(replay, model.selections, stands, pool))
    x, taps, state = decode_group(
        model,
        view,
        params,
        state,
        stands,
        x,
        block,
        query_positions(state, view),
        live,
        places,
    )
    back = lambda old, new: with_row(old, pool, new[stands])
    rows = jax.tree.map(back, parts.rows, rows_of(state))
    after = Parts(pool=state.pools[stands], hot=state.hot[number], rows=rows, step=state.step)
    return x, taps, after


def rows_of(state: HierarchyState) -> dict[str, Any]:
    """What the group of a pool writes, by rows of pools."""
    return {name: getattr(state, name) for name in ROWS}


def _alone(one: Any, place: int) -> Any:  # noqa: ANN401
    """A tuple with one thing at its place, and nothing before."""
    return (*(None for _ in range(place)), one)


def end(  # noqa: PLR0913  # what jit binds, and what it is called with
    model: Shard,
    speculation: Speculation,
    cfg: HierarchyConfig,
    params: ShardParams,
    draft_params: Any,  # noqa: ANN401
    asked: Asked,
    x: Float[Array, "R T D"],
    features: tuple[Float[Array, "R T D"], ...],
    state: DecodeState,
    place: Packed,
) -> tuple[DecodeState, Packed]:
    """Verify, and settle."""
    with jax.named_scope("verify"):
        logits = model.logits(params, x)
        seen = jnp.concatenate([x[..., :0], *features], axis=-1)
    output, state = settle(
        speculation, cfg, draft_params, state, asked, logits, seen, state.hierarchy
    )
    return state, packed(jax.tree.map(lambda leaf: leaf[None], output))
