"""The programs of a decode step in pieces: what asks, what runs a group, what settles.

They are the library's functions. A group's program is that of the first pool of its kind: it sees
the rows of another pool in that pool's place, and where that one's tails lie is a number that it is
given.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from bench.shard_protocol import Shard
from bench.shard_replay import Replay, ShardParams, as_that_of
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.output import Packed, packed
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.state import HierarchyState, HotPool, PoolState, abstract
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
        rows: see `rows_of`.
        step: clock of the hierarchy.
    """

    pool: PoolState
    hot: HotPool
    rows: Int[Array, "pools R n"]
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
        rows: see `rows_of`, likewise.
        taps: of the groups that the drafter reads, by pool.
    """

    asked: Asked
    x: Float[Array, "R T D"]
    rows: Int[Array, "pools R n"]
    taps: tuple[tuple[Float[Array, "R T D"], ...], ...]


Begun = tuple[Asked, Float[Array, "R T D"], Int[Array, "pools R n"]]


def begin(  # what jit binds, and what it is called with
    model: Shard,
    speculation: Speculation,
    cfg: HierarchyConfig,
    params: ShardParams,
    draft_params: Any,  # noqa: ANN401
    profile: Profile,
    state: DecodeState,
    _: Begun,
) -> Begun:
    """Ask, and embed, in the place of what is donated."""
    asked = ask(speculation, cfg, draft_params, profile, state)
    with jax.named_scope("embed"):
        return asked, model.embed(params, asked.block), rows_of(state.hierarchy)


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
        **_named(cfg, with_row(parts.rows, stands, parts.rows[pool])),
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
    after = Parts(
        pool=state.pools[stands],
        hot=state.hot[number],
        rows=with_row(parts.rows, pool, rows_of(state)[stands]),
        step=state.step,
    )
    return x, taps, after


def rows_of(state: HierarchyState) -> Int[Array, "pools R n"]:
    """All that a hierarchy has of every pool and request, and groups write, beside each other.

    One array, so that a group changes its row of it by one kernel.
    """
    found = [leaf for name in ROWS for leaf in jax.tree.leaves(getattr(state, name))]
    words = [leaf if leaf.dtype == jnp.int32 else leaf.view(jnp.int32) for leaf in found]
    return jnp.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in words], axis=-1)


def _named(cfg: HierarchyConfig, rows: Int[Array, "pools R n"]) -> dict[str, Any]:
    """What is in `rows_of`, by name."""
    shapes = {name: getattr(abstract(cfg), name) for name in ROWS}
    leaves, form = jax.tree.flatten(shapes)
    ends = np.cumsum([math.prod(leaf.shape[2:]) for leaf in leaves])
    parts = jnp.split(rows, ends[:-1], axis=-1)
    return form.unflatten(
        part.reshape(leaf.shape).view(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)
    )


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
    rows: Int[Array, "pools R n"],
    features: tuple[Float[Array, "R T D"], ...],
    state: DecodeState,
    place: Packed,
) -> tuple[DecodeState, Packed]:
    """Verify, and settle."""
    with jax.named_scope("verify"):
        logits = model.logits(params, x)
        seen = jnp.concatenate([x[..., :0], *features], axis=-1)
    hierarchy = dataclasses.replace(state.hierarchy, **_named(cfg, rows))
    output, state = settle(speculation, cfg, draft_params, state, asked, logits, seen, hierarchy)
    return state, packed(jax.tree.map(lambda leaf: leaf[None], output))
