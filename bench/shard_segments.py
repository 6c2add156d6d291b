"""The decode step in pieces, so that selection groups of one kind share a program.

A compiler takes many minutes for 78 layers in a row, and seconds for the four of a group. So the
step is cut where `dhisparse_jax.step` and `.verify` are: a program that asks, one for each kind of
group, and one that settles, dispatched one after the other without waiting. The functions in them
are the library's. A group's program is that of one `model` pool of its kind: it sees the rows of
another pool in that pool's place, and where that one's tails lie is a number that it is given.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bench.shard_model import Replay, ShardModel, ShardParams
from bench.shard_weights import Layer, Weights
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.output import Packed, packed
from dhisparse_jax.hierarchy.append import query_positions
from dhisparse_jax.hierarchy.state import HierarchyState, HotPool, PoolState
from dhisparse_jax.hierarchy.update import with_row
from dhisparse_jax.model import layers_of
from dhisparse_jax.pytree import state as pytree
from dhisparse_jax.speculation.schedule import Profile
from dhisparse_jax.step import Asked, DecodeState, Speculation, ask, settle
from dhisparse_jax.verify import decode_group

Place = Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneOfItsKind(HierarchyConfig):
    """The sizes of a hierarchy, seen from a pool that stands for others.

    Attributes:
        member: place of the pool meant among those of its hot pool.
    """

    member: Any

    def hot_pool_of(self, pool: int) -> tuple[int, Any]:
        """See `HierarchyConfig.hot_pool_of`."""
        return super().hot_pool_of(pool)[0], self.member


@pytree
class Parts:
    """What the program of a group changes in place; donate it.

    Attributes:
        pool: the pool.
        hot: its hot pool.
    """

    pool: PoolState
    hot: HotPool


class Kind(NamedTuple):
    """What the groups that share a program have in common: hot pool, and the kind of each layer."""

    hot: int
    routed: tuple[bool, ...]


def kind_of(model: ShardModel, cfg: HierarchyConfig, pool: int) -> Kind:
    """The kind of a group."""
    dense = model.config.num_dense_layers
    layers = model.config.groups[pool]
    return Kind(cfg.hot_pool_of(pool)[0], tuple(number >= dense for number in layers))


@dataclasses.dataclass(frozen=True)
class Segments:
    """The programs of a step, and which pool stands for which.

    Attributes:
        cfg: sizes of the hierarchy.
        taps: layers that the drafter reads.
        model_pool: for each pool, the one whose program runs it.
        begin: asks, and embeds.
        groups: by the pool that stands for its kind.
        end: settles.
    """

    cfg: HierarchyConfig
    taps: tuple[int, ...]
    model_pool: tuple[int, ...]
    begin: Callable[..., Any]
    groups: dict[int, Callable[..., Any]]
    end: Callable[..., Any]

    def __call__(
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401  # a drafter's own
        profile: Profile,
        state: DecodeState,
        place: Packed,
    ) -> tuple[DecodeState, Packed]:
        """A step, as `engine.output.packed_steps` does it."""
        asked, x = self.begin(*self.begin_operands(params, draft_params, profile, state))
        hierarchy, tapped = state.hierarchy, dict[int, Array]()
        for pool, stands in enumerate(self.model_pool):
            operands = self.group_operands(params, pool, hierarchy, x, asked)
            x, here, parts, rows = self.groups[stands](*operands)
            hierarchy = with_parts(hierarchy, self.cfg, pool, parts, rows)
            layers = layers_of(self.cfg.geometry, pool, tuple(range(len(here))))
            tapped |= zip(layers, here, strict=True)
        features = tuple(tapped[layer] for layer in self.taps)
        state = dataclasses.replace(state, hierarchy=hierarchy)
        return self.end(*self.end_operands(params, draft_params, state, asked, x, features), place)

    def begin_operands(
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401
        profile: Profile,
        state: DecodeState,
    ) -> tuple[Any, ...]:
        """What `begin` takes."""
        bare = dataclasses.replace(state, hierarchy=_rest(state.hierarchy))
        return params.weights.embedding, draft_params, profile, bare

    def group_operands(
        self,
        params: ShardParams,
        pool: int,
        hierarchy: HierarchyState,
        x: Any,  # noqa: ANN401
        asked: Any,  # noqa: ANN401
    ) -> tuple[Any, ...]:
        """What the program of a group takes."""
        number, _ = self.cfg.hot_pool_of(pool)
        parts = Parts(pool=hierarchy.pools[pool], hot=hierarchy.hot[number])
        own = layers_of(self.cfg.geometry, pool, tuple(range(self._layers(pool))))
        layers = tuple(params.weights.layers[number] for number in own)
        where = jnp.int32(pool), jnp.int32(self.cfg.hot_pool_of(pool)[1])
        return layers, params.replay, where, x, asked.block, asked.live, _rest(hierarchy), parts

    def end_operands(
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401
        state: DecodeState,
        asked: Any,  # noqa: ANN401
        x: Any,  # noqa: ANN401
        features: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """What `end` takes, but for the place of the output."""
        outer = dataclasses.replace(params.weights, layers=(), embedding=())
        outer = ShardParams(weights=outer, replay=params.replay)
        return outer, draft_params, asked, x, features, state

    def _layers(self, pool: int) -> int:
        return self.cfg.geometry.layers_per_pool[pool]


def segments(model: ShardModel, speculation: Speculation, cfg: HierarchyConfig) -> Segments:
    """The programs of a step; each compiles when it is first called, or with `lower`."""
    kinds = [kind_of(model, cfg, pool) for pool in range(cfg.pools)]
    stands = tuple(kinds.index(kind) for kind in kinds)
    taps = speculation.drafter.taps
    own = lambda pool: partial(_group, model, cfg, pool, bool(taps))
    group = lambda pool: _named(own(pool), Which("groups", pool).name, (7,))
    return Segments(
        cfg=cfg,
        taps=taps,
        model_pool=stands,
        begin=_named(partial(_begin, model, speculation, cfg), "begin", ()),
        groups={
            pool: _named(group(pool), Which("groups", pool).name, (7,)) for pool in set(stands)
        },
        end=_named(partial(_end, model, speculation, cfg), "end", (5, 6)),
    )


class Which(NamedTuple):
    """A program of a step: a field of `Segments`, and for a group the pool that stands for it."""

    field: str
    pool: int = 0

    @property
    def name(self) -> str:
        """What profiles call it."""
        return f"group_{self.pool}" if self.field == "groups" else self.field


def lowered(seg: Segments, operands: tuple[Any, ...]) -> Iterator[tuple[Which, Any]]:
    """Every program, lowered from shapes."""
    params, draft_params, profile, state, place = operands
    begin = seg.begin_operands(params, draft_params, profile, state)
    yield Which("begin"), seg.begin.lower(*begin)  # type: ignore[attr-defined]
    asked, x = jax.eval_shape(seg.begin, *begin)
    for pool, program in seg.groups.items():
        group = seg.group_operands(params, pool, state.hierarchy, x, asked)
        yield Which("groups", pool), program.lower(*group)  # type: ignore[attr-defined]
    features = tuple(x for _ in seg.taps)
    end = seg.end_operands(params, draft_params, state, asked, x, features)
    yield Which("end"), seg.end.lower(*end, place)  # type: ignore[attr-defined]


def compiled(seg: Segments, programs: Mapping[Which, Any]) -> Segments:
    """The step, of these executables."""
    groups = {which.pool: made for which, made in programs.items() if which.field == "groups"}
    begin, end = programs[Which("begin")], programs[Which("end")]
    return dataclasses.replace(seg, begin=begin, groups=groups, end=end)


def with_parts(
    hierarchy: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    parts: Parts,
    rows: dict[str, Any],
) -> HierarchyState:
    """The hierarchy with what the program of a group has changed."""
    number, _ = cfg.hot_pool_of(pool)
    pools, hot = list(hierarchy.pools), list(hierarchy.hot)
    pools[pool], hot[number] = parts.pool, parts.hot
    return dataclasses.replace(hierarchy, pools=tuple(pools), hot=tuple(hot), **rows)


def _rest(hierarchy: HierarchyState) -> HierarchyState:
    return dataclasses.replace(hierarchy, pools=(), hot=())


def _named(function: Callable[..., Any], name: str, donated: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Jitted, under a name of its own in profiles."""

    def program(*operands: Any) -> Any:  # noqa: ANN401
        return function(*operands)

    program.__name__ = name
    return jax.jit(program, donate_argnums=donated)


def _begin(
    model: ShardModel,
    speculation: Speculation,
    cfg: HierarchyConfig,
    embedding: Float[Array, "V D"],
    draft_params: Any,  # noqa: ANN401
    profile: Profile,
    state: DecodeState,
) -> tuple[Asked, Float[Array, "R T D"]]:
    asked = ask(speculation, cfg, draft_params, profile, state)
    with jax.named_scope("embed"):
        return asked, embedding[asked.block].astype(model.dtype)


def _group(  # noqa: PLR0913  # what jit binds, and what it is called with
    model: ShardModel,
    cfg: HierarchyConfig,
    stands: int,
    tapped: bool,
    layers: tuple[Layer, ...],
    replay: Replay,
    where: tuple[Place, Place],
    x: Float[Array, "R T D"],
    block: Int[Array, "R T"],
    live: Int[Array, " R"],
    rest: HierarchyState,
    parts: Parts,
) -> tuple[Float[Array, "R T D"], tuple[Float[Array, "R T D"], ...], Parts, dict[str, Any]]:
    """The group of pool `where[0]`, which is `where[1]` in its hot pool, as that of `stands`."""
    pool, member = where
    sizes = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    view = OneOfItsKind(**sizes, member=member)
    number, _ = cfg.hot_pool_of(stands)
    state = dataclasses.replace(
        _with_rows(rest, lambda leaf: with_row(leaf, stands, leaf[pool])),
        pools=_alone(parts.pool, stands),
        hot=_alone(parts.hot, number),
        active=rest.active & (live > 0),
    )
    places = tuple(range(len(layers))) if tapped else ()
    x, taps, state = decode_group(
        model,
        view,
        _params_of(model, stands, layers, replay, pool),
        state,
        stands,
        x,
        block,
        query_positions(state, view),
        live,
        places,
    )
    back = lambda old, new: with_row(old, pool, new[stands])
    rows = jax.tree.map(back, _rows(rest), _rows(state))
    parts = Parts(pool=state.pools[stands], hot=state.hot[number])
    return x, taps, parts, {**rows, "step": state.step}


def _rows(state: HierarchyState) -> dict[str, Any]:
    """What the group of a pool writes, by rows of pools."""
    return {name: getattr(state, name) for name in ("benefit", "counts", "selection")}


def _with_rows(state: HierarchyState, change: Callable[[Array], Array]) -> HierarchyState:
    return dataclasses.replace(state, **jax.tree.map(change, _rows(state)))


def _alone(one: Any, place: int) -> Any:  # noqa: ANN401
    """A tuple with one thing at its place, and nothing before."""
    return (*(None for _ in range(place)), one)


def _params_of(
    model: ShardModel, stands: int, layers: tuple[Layer, ...], replay: Replay, pool: Place
) -> ShardParams:
    """The weights of a group in the places of another one's, which follows its traces."""
    first = model.config.groups[stands][0]
    nothing: Any = None
    every = (*(nothing for _ in range(first)), *layers)
    weights = Weights(embedding=nothing, head=nothing, norm=nothing, layers=every)
    trace = with_row(replay.trace, stands, replay.trace[pool])
    return ShardParams(weights=weights, replay=dataclasses.replace(replay, trace=trace))


def _end(  # noqa: PLR0913  # what jit binds, and what it is called with
    model: ShardModel,
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
    with jax.named_scope("verify"):
        logits = model.logits(params, x)
        seen = jnp.concatenate([x[..., :0], *features], axis=-1)
    output, state = settle(
        speculation, cfg, draft_params, state, asked, logits, seen, state.hierarchy
    )
    return state, packed(jax.tree.map(lambda leaf: leaf[None], output))
