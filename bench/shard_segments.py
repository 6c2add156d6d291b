"""The decode step in pieces, so that selection groups of one kind share a program.

A compiler takes many minutes for 78 layers in a row, and seconds for the four of a group. So the
step is cut where `dhisparse_jax.step` and `.verify` are: a program that asks, one for each kind of
group, and one that settles (`bench.shard_programs`), dispatched one after the other.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from bench import shard_programs as programs
from bench.shard_programs import Between, Parts, Place
from bench.shard_protocol import Shard
from bench.shard_replay import ShardParams
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.output import Packed
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.model import layers_of, places_of
from dhisparse_jax.speculation.schedule import Profile
from dhisparse_jax.step import DecodeState, Speculation


@dataclasses.dataclass(frozen=True)
class Segments:
    """The programs of a step, and which pool stands for which.

    Attributes:
        model: the share.
        speculation: who proposes.
        cfg: sizes of the hierarchy.
        taps: layers that the drafter reads.
        places: of these in the groups that a program runs, by the pool that stands for its kind.
        model_pool: for each pool, the one whose program runs it.
        where: each pool, and its place in its hot pool, on the device: sent once.
        begin: asks, and embeds.
        groups: by the pool that stands for its kind; compiled, every pool has its own.
        end: settles.
    """

    model: Shard
    speculation: Speculation
    cfg: HierarchyConfig
    taps: tuple[int, ...]
    places: dict[int, tuple[int, ...]]
    model_pool: tuple[int, ...]
    where: tuple[tuple[Place, Place], ...]
    begin: Callable[..., Any]
    groups: dict[int, Callable[..., Any]]
    end: Callable[..., Any]

    def __call__(  # what a step takes
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401  # a drafter's own
        profile: Profile,
        state: DecodeState,
        place: Packed,
        between: Between,
    ) -> tuple[DecodeState, Packed, Between]:
        """A step, as `engine.output.packed_steps` does it; donate the last three."""
        begin = self.begin_operands(params, draft_params, profile, state)
        asked, x, rows = self.begin(*begin, (between.asked, between.x, between.rows))
        hierarchy, taps = state.hierarchy, list(between.taps)
        for pool, stands in enumerate(self.model_pool):
            operands = self.group_operands(params, pool, hierarchy, asked)
            x, taps[pool], parts = self.groups.get(pool, self.groups[stands])(
                *operands, x, taps[pool], parts_of(hierarchy, self.cfg, pool, rows)
            )
            hierarchy, rows = with_parts(hierarchy, self.cfg, pool, parts), parts.rows
        state = dataclasses.replace(state, hierarchy=hierarchy)
        end = self.end_operands(params, draft_params, state, asked, x, rows, self.tapped(taps))
        state, place = self.end(*end, place)
        return state, place, Between(asked=asked, x=x, rows=rows, taps=tuple(taps))

    def tapped(self, taps: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """What the drafter reads, of what groups have tapped."""
        found: dict[int, Any] = {}
        for pool, (stands, here) in enumerate(zip(self.model_pool, taps, strict=True)):
            layers = layers_of(self.cfg.geometry, pool, self.places[stands])
            found |= zip(layers, here, strict=True)
        return tuple(found[layer] for layer in self.taps)

    def between(
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401
        profile: Profile,
        state: DecodeState,
    ) -> Between:
        """Shapes of what goes from program to program."""
        begin = partial(programs.begin, self.model, self.speculation, self.cfg)
        operands = self.begin_operands(params, draft_params, profile, state)
        asked, x, rows = jax.eval_shape(begin, *operands, None)
        kind = next((kind for kind, places in self.places.items() if places), None)
        tapped: Any = None
        if kind is not None:  # all have the same shape
            group = partial(programs.group, self.model, self.cfg, kind, self.places[kind])
            given = self.group_operands(params, kind, state.hierarchy, asked)
            parts = parts_of(state.hierarchy, self.cfg, kind, rows)
            tapped = jax.eval_shape(group, *given, x, None, parts)[1][0]
        taps = tuple((tapped,) * len(self.places[stands]) for stands in self.model_pool)
        return Between(asked=asked, x=x, rows=rows, taps=taps)

    def begin_operands(
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401
        profile: Profile,
        state: DecodeState,
    ) -> tuple[Any, ...]:
        """What `begin` takes."""
        bare = dataclasses.replace(state, hierarchy=_rest(state.hierarchy))
        own = self.model.begin_weights(params.weights)
        return ShardParams(weights=own, replay=params.replay), draft_params, profile, bare

    def group_operands(
        self,
        params: ShardParams,
        pool: int,
        hierarchy: HierarchyState,
        asked: Any,  # noqa: ANN401
    ) -> tuple[Any, ...]:
        """What the program of a group takes, but for what is donated."""
        own = self.model.group_weights(params.weights, pool, self.model_pool[pool])
        nothing = dict.fromkeys((*programs.ROWS, "step"))
        rest = dataclasses.replace(_rest(hierarchy), **nothing)  # type: ignore[arg-type]
        return own, params.replay, self.where[pool], asked.block, asked.live, rest

    def end_operands(
        self,
        params: ShardParams,
        draft_params: Any,  # noqa: ANN401
        state: DecodeState,
        asked: Any,  # noqa: ANN401
        x: Any,  # noqa: ANN401
        rows: Any,  # noqa: ANN401
        features: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """What `end` takes, but for the place of the output."""
        own = self.model.end_weights(params.weights)
        outer = ShardParams(weights=own, replay=params.replay)
        return outer, draft_params, asked, x, rows, features, state


def segments(model: Shard, speculation: Speculation, cfg: HierarchyConfig) -> Segments:
    """The programs of a step; each compiles when it is first called, or with `lower`."""
    kinds = [(cfg.hot_pool_of(pool)[0], model.kind(pool)) for pool in range(cfg.pools)]
    stands = tuple(kinds.index(kind) for kind in kinds)
    taps = speculation.drafter.taps
    places = {pool: _tapped(cfg, stands, pool, taps) for pool in sorted(set(stands))}
    own = lambda pool: partial(programs.group, model, cfg, pool, places[pool])
    return Segments(
        model=model,
        speculation=speculation,
        cfg=cfg,
        taps=taps,
        places=places,
        model_pool=stands,
        where=tuple(
            (jnp.int32(pool), jnp.int32(cfg.hot_pool_of(pool)[1])) for pool in range(cfg.pools)
        ),
        begin=_named(partial(programs.begin, model, speculation, cfg), "begin", (4,)),
        groups={pool: _named(own(pool), Which("groups", pool).name, (6, 7, 8)) for pool in places},
        end=_named(partial(programs.end, model, speculation, cfg), "end", (6, 7)),
    )


def _tapped(
    cfg: HierarchyConfig, stands: tuple[int, ...], pool: int, taps: tuple[int, ...]
) -> tuple[int, ...]:
    """Places of what a drafter reads in any of the groups that a pool stands for."""
    others = (other for other, stand in enumerate(stands) if stand == pool)
    return tuple(sorted({p for other in others for p in places_of(cfg.geometry, other, taps)}))


def zeros_like(shapes: Between) -> Between:
    """Arrays of these shapes, for a first step."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


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
    params, draft_params, profile, state, place, between = operands
    asked, x, rows = between.asked, between.x, between.rows
    begin = seg.begin_operands(params, draft_params, profile, state)
    yield Which("begin"), seg.begin.lower(*begin, (asked, x, rows))  # type: ignore[attr-defined]
    for pool, program in seg.groups.items():
        group = seg.group_operands(params, pool, state.hierarchy, asked)
        donated = x, between.taps[pool], parts_of(state.hierarchy, seg.cfg, pool, rows)
        yield Which("groups", pool), program.lower(*group, *donated)  # type: ignore[attr-defined]
    features = seg.tapped(between.taps)
    end = seg.end_operands(params, draft_params, state, asked, x, rows, features)
    yield Which("end"), seg.end.lower(*end, place)  # type: ignore[attr-defined]


def compiled(seg: Segments, made: Mapping[Which, Any]) -> Segments:
    """The step, of these executables.

    Each group gets a copy of that of its kind, loaded for itself alone: a GPU keeps the kernels of
    an executable as a graph, and every kernel in it has to be told when its operands have moved.
    """
    kinds = {which.pool: program for which, program in made.items() if which.field == "groups"}
    stored = {stands: serialize(program) for stands, program in kinds.items()}
    groups = {
        pool: kinds[stands] if pool == stands else deserialize_and_load(*stored[stands])
        for pool, stands in enumerate(seg.model_pool)
    }
    begin, end = made[Which("begin")], made[Which("end")]
    return dataclasses.replace(seg, begin=begin, groups=groups, end=end)


def parts_of(
    hierarchy: HierarchyState,
    cfg: HierarchyConfig,
    pool: int,
    rows: Any,  # noqa: ANN401
) -> Parts:
    """What the program of a group changes."""
    hot = hierarchy.hot[cfg.hot_pool_of(pool)[0]]
    return Parts(pool=hierarchy.pools[pool], hot=hot, rows=rows, step=hierarchy.step)


def with_parts(
    hierarchy: HierarchyState, cfg: HierarchyConfig, pool: int, parts: Parts
) -> HierarchyState:
    """The hierarchy with what the program of a group has changed, but for rows of pools."""
    number, _ = cfg.hot_pool_of(pool)
    pools, hot = list(hierarchy.pools), list(hierarchy.hot)
    pools[pool], hot[number] = parts.pool, parts.hot
    return dataclasses.replace(hierarchy, pools=tuple(pools), hot=tuple(hot), step=parts.step)


def _rest(hierarchy: HierarchyState) -> HierarchyState:
    return dataclasses.replace(hierarchy, pools=(), hot=())


def _named(function: Callable[..., Any], name: str, donated: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Jitted, under a name of its own in profiles."""

    def program(*operands: Any) -> Any:  # noqa: ANN401
        return function(*operands)

    program.__name__ = name
    # What is donated for its place alone is not read, and JAX would leave it out.
    return jax.jit(program, donate_argnums=donated, keep_unused=True)
