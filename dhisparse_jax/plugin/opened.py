"""A step that has begun: which group is open in it, and which layers have been."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import group as groups
from dhisparse_jax.hierarchy.group import OpenGroup
from dhisparse_jax.hierarchy.layout import Layer
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.plugin.choice import Choice, check_index, not_finite, own_selection
from dhisparse_jax.plugin.sizes import scalar
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT

_STATIC = {"static": True}


@pytree
class OpenStep:
    """A step that has begun. Hand it from layer to layer; `positions` is for the model to read.

    Attributes:
        positions: int32 position of every new token.
        wrong: queries that selected what they do not see or by what are no numbers, are beyond the
            capacity, or went through a layer that is none of its group, or had been.
        given: layers whose rows were given.
        history: the hierarchy, or its open group.
        cfg: sizes of the hierarchy; static.
        group: number of the open group, NO_SLOT before the first; static.
        opened: groups that have selected; static.
        written: layers whose rows were given, and `~n` for a layer n that a scan may give; static.
    """

    positions: Int[Array, "R T"]
    wrong: Bool[Array, "R T"]
    given: Bool[Array, " L"]
    history: HierarchyState | OpenGroup
    cfg: HierarchyConfig = dataclasses.field(metadata=_STATIC)
    group: int = dataclasses.field(default=NO_SLOT, metadata=_STATIC)
    opened: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)
    written: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)


def layers_of(cfg: HierarchyConfig, group: int) -> range:
    """Numbers of the layers of a group."""
    sizes = cfg.geometry.layers_per_pool
    if not 0 <= group < len(sizes):
        raise UserError(f"there is no group {group}; there are {len(sizes)}")
    return range(sum(sizes[:group]), sum(sizes[: group + 1]))


def _group_with(cfg: HierarchyConfig, layer: int) -> int:
    """The group of a layer."""
    for group in range(cfg.pools):
        if layer in layers_of(cfg, group):
            return group
    sizes = cfg.geometry.layers_per_pool
    raise UserError(f"there is no layer {layer}; layers_per_pool {sizes} has {sum(sizes)}")


def group_of(step: OpenStep) -> OpenGroup:
    """The group that is open. Raises UserError where none is."""
    if not isinstance(step.history, OpenGroup):
        raise UserError("no group has selected yet; the first layer of each gives `select`")
    return step.history


def enter(step: OpenStep, layer: Layer, choice: Choice | None) -> tuple[OpenStep, Layer]:
    """The step with the group of a layer open, and the place of the layer in it."""
    layer = _as_known(layer)
    if isinstance(layer, int):
        step = _enter_known(step, layer, choice)
    elif choice is not None:
        raise UserError(
            "a layer that selects has an int as its number: in a scan over layers, where it is an "
            "array, `select` comes before it"
        )
    elif (group_of(step), layer.shape, layer.dtype)[1:] != ((), jnp.int32):
        raise UserError(f"a layer is {layer.dtype} {layer.shape}; it must be one int32 number")
    numbers = layers_of(step.cfg, step.group)
    place = layer - numbers[0]
    possible = jnp.clip(jnp.asarray(place, jnp.int32), 0, len(numbers) - 1)
    number = possible + numbers[0]
    inside = possible == place
    fits = inside & ~step.given[number]
    checkify.debug_check(
        fits, f"layer {{}} is not in group {step.group}, or has kept its rows", jnp.int32(layer)
    )
    given = step.given.at[number].set(step.given[number] | inside)
    step = dataclasses.replace(step, wrong=step.wrong | ~fits, given=given)
    return step, place if isinstance(place, int) else possible


def _as_known(layer: Layer) -> Layer:
    """The number of a layer as an int, where its value is known while a step is traced."""
    if isinstance(layer, jax.core.Tracer):
        return layer
    scalar("a layer", layer)
    return operator.index(layer)


def _enter_known(step: OpenStep, layer: int, choice: Choice | None) -> OpenStep:
    """The step with the group of a layer open, where its number is known to the program."""
    group = _group_with(step.cfg, layer)
    if choice is not None:
        step = open_(step, group, choice)
    elif group != step.group:
        raise UserError(_why_not_open(step, layer, group))
    if layer in step.written:
        raise UserError(f"layer {layer} has kept its rows in this step; a layer does it once")
    return dataclasses.replace(step, written=(*step.written, layer))


def _why_not_open(step: OpenStep, layer: int, group: int) -> str:
    """What is expected in place of a layer whose group is not open."""
    first = layers_of(step.cfg, group)[0]
    if group in step.opened:
        return f"layer {layer} comes too late: group {group} ended when group {step.group} selected"
    if layer == first:
        return f"layer {layer} is the first one of group {group}; it must select"
    return (
        f"layer {layer} comes before group {group} has selected, which layer {first} does; go on "
        "with the step that each layer returns"
    )


def check_open(step: object) -> None:
    """Whether it is a step that has begun. Raises UserError where it is none."""
    if not isinstance(step, OpenStep):
        raise UserError(f"the step is a {type(step).__name__}; it must be what begin_step returns")


def open_(step: OpenStep, group: int, choice: Choice) -> OpenStep:
    """The step with a group open, and the one before it closed."""
    cfg, state = step.cfg, step.history
    if group in step.opened:
        raise UserError(f"group {group} has selected in this step; only its first layer does")
    if isinstance(state, OpenGroup):
        state = groups.close_group(state, cfg, step.group)
    if isinstance(choice, IndexInputs):
        check_index(cfg, choice)
        unseen = not_finite(choice) & state.active[:, None]
        checkify.debug_check(
            ~unseen.any(), f"group {group} selects by queries, weights or keys that are no numbers"
        )
        opened = groups.open_group(state, cfg, group, choice)
    elif cfg.geometry.index_width:
        raise UserError(
            f"positions keep no index key, and index_width is {cfg.geometry.index_width}: select "
            "by IndexInputs in every step, or set it to 0"
        )
    else:
        with jax.named_scope("select"):
            selection, unseen = own_selection(state, cfg, step.positions, choice)
        checkify.debug_check(
            ~unseen.any(), f"group {group} selects positions that a query does not see"
        )
        opened = groups.open_selected(state, cfg, group, selection)
    return dataclasses.replace(
        step, history=opened, wrong=step.wrong | unseen, group=group, opened=(*step.opened, group)
    )
