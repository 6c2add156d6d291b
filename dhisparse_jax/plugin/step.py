"""One decode step of a model that calls the hierarchy itself.

`begin_step`, then `attend` (or `read`) once in every layer, group by group, and `end_step`. All of
it runs under `jit`, with the state donated. What layers hand on is an `OpenStep`, a pytree of one
structure within a group whose layers are scanned over:

    step = select(step, group, choice)                       # before the scan
    def layer(carry, number): ... attend(step, number, row, query) ...
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax import step as decode
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import group as groups
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.append import append_row, query_positions
from dhisparse_jax.hierarchy.group import OpenGroup
from dhisparse_jax.hierarchy.layout import Layer
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.plugin.choice import Choice, check_index, own_selection
from dhisparse_jax.plugin.rows import Rows, flat, unflat
from dhisparse_jax.plugin.sizes import check_state
from dhisparse_jax.pytree import state as pytree
from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.rows import gather_words, unpack
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.common.scaled_rows import decode as decode_rows

_STATIC = {"static": True}


@pytree
class OpenStep:
    """A step that has begun. Hand it from layer to layer; `positions` is for the model to read.

    Attributes:
        positions: int32 position of every new token.
        wrong: queries that selected what they do not see, or are beyond the capacity.
        history: the hierarchy, or its open group.
        cfg: sizes of the hierarchy; static.
        group: number of the open group, NO_SLOT before the first; static.
        opened: groups that have selected; static.
        written: layers whose rows were given, and `~n` for a layer n that a scan may give; static.
    """

    positions: Int[Array, "R T"]
    wrong: Bool[Array, "R T"]
    history: HierarchyState | OpenGroup
    cfg: HierarchyConfig = dataclasses.field(metadata=_STATIC)
    group: int = dataclasses.field(default=NO_SLOT, metadata=_STATIC)
    opened: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)
    written: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)


class Selected(NamedTuple):
    """Rows that every query selected, in ascending order of their positions.

    Attributes:
        rows: as they were given, `[R, T, K, ...]`; of a format with scales, float32 numbers.
        positions: int32 positions.
        valid: which entries there are; the rows of the others are zeros.
    """

    rows: Rows
    positions: Int[Array, "R T K"]
    valid: Bool[Array, "R T K"]


def begin_step(state: HierarchyState, cfg: HierarchyConfig) -> OpenStep:
    """Begin a step for T new tokens of every request, at `OpenStep.positions`.

    Args:
        state: the hierarchy.
        cfg: its sizes; static.

    Raises:
        UserError: the geometry is that of a compressed history, or the state is of other sizes.
    """
    geometry = cfg.geometry
    if geometry.kept or geometry.rates or geometry.candidates:
        raise UserError("rates, kept and candidates of a Geometry are for models that are served")
    check_state(state, cfg)
    positions = query_positions(state, cfg)
    checkify.debug_check(
        state.active.any(), "a step without a request: admit one before the first step"
    )
    full = jnp.where(state.active, state.length, 0).max()
    checkify.debug_check(
        full < cfg.capacity,
        f"a request has {{}} positions, and the capacity is {cfg.capacity}: end it, or raise that",
        full,
    )
    beyond = state.active[:, None] & (positions >= cfg.capacity)
    return OpenStep(positions=positions, wrong=beyond, history=state, cfg=cfg)


def select(step: OpenStep, group: int, choice: Choice) -> OpenStep:
    """Select for all layers of a group, without attending.

    For a group whose layers are scanned over; elsewhere the first layer hands its choice to
    `attend` or `read`.

    Args:
        step: the step.
        group: which group, from 0.
        choice: see `Choice`; positions up to each query's own, itself included.

    Raises:
        UserError: there is no such group, it has selected already, or the choice has another shape
            than the geometry says.
    """
    scanned = tuple(~layer for layer in _layers(step.cfg, group))  # by which numbers is not known
    opened = _open(step, group, choice)
    history = groups.close_group(_group_of(opened), step.cfg, group)
    complete = dataclasses.replace(_group_of(opened), state=history, complete=True)
    return dataclasses.replace(opened, history=complete, written=(*opened.written, *scanned))


def attend(
    step: OpenStep,
    layer: Layer,
    row: Rows,
    query: Float[Array, "..."],
    select: Choice | None = None,
) -> tuple[Attended, OpenStep]:
    """Keep the rows of the new tokens in one layer, and attend over the selected rows.

    Args:
        step: the step.
        layer: number of the layer in the model, from 0. An array in a scan over the layers of a
            group that has selected; numbers outside of the group are not detected there.
        row: rows of the new tokens: MLA `[R, T, width]`; GQA keys `[R, T, heads, key]` and values
            `[R, T, heads, value]`.
        query: queries `[R, T, H, key]`; of MLA absorbed ones, as wide as a row. Query head h reads
            head `h // (H / heads)` of the rows.
        select: what the first layer of a group selects, for all of it; None in the others.

    Returns:
        `values [R, T, H, value]`: `softmax(scale * query . key) . value` over the selected rows in
        the dtype of `query`, zeros where there are none; `lse [R, T, H]`, with which attention over
        other rows can be merged; and the step to go on with.

    Raises:
        UserError: the layer cannot come now, or an array is not as the geometry says.
    """
    new = step.positions.shape
    if query.ndim != 4 or query.shape[:2] != new:
        raise UserError(f"queries have shape {query.shape}; it must be {(*new, 'heads', 'key')}")
    step, place = _enter(step, layer, select)
    row = flat(step.cfg.geometry.row, row, new)
    attended, group = groups.attend(_group_of(step), step.cfg, step.group, place, row, query)
    values = jnp.where(step.wrong[..., None, None], jnp.nan, attended.values)
    return attended._replace(values=values), dataclasses.replace(step, history=group)


def read(
    step: OpenStep, layer: Layer, row: Rows, select: Choice | None = None
) -> tuple[Selected, OpenStep]:
    """Keep the rows of the new tokens in one layer, and read the selected rows.

    For rows of bytes, and for attention of another form than that of `attend`. The rows of every
    query are copied: `R * T * K` of them.

    Args:
        step: the step.
        layer: see `attend`.
        row: see `attend`; bytes are uint8 `[R, T, size]`.
        select: see `attend`.

    Raises:
        UserError: see `attend`.
    """
    step, place = _enter(step, layer, select)
    cfg, row_format = step.cfg, step.cfg.geometry.row
    row = flat(row_format, row, step.positions.shape)
    group = _group_of(step)
    state = append_row(groups.close_group(group, cfg, step.group), cfg, step.group, place, row)
    number, _ = cfg.hot_pool_of(step.group)
    location, words = group.plan.location, row_format.words
    slots = state.hot[number].slots
    first_word = place * layout.row_stride(cfg.geometry, slots)
    found = gather_words(slots, jnp.maximum(location, 0), first_word, words)
    valid = location >= 0
    found = jnp.where(valid[..., None], found, 0)
    found = jnp.where(step.wrong[..., None, None], -1, found)  # NaN, or bytes of 255
    if isinstance(row_format.dtype, ScaledRow):
        numbers = decode_rows(found, row_format.dtype)
    else:
        numbers = unpack(found, jnp.dtype(row_format.dtype))
    group = dataclasses.replace(group, state=state, complete=True)
    selected = Selected(unflat(row_format, numbers), group.selection, valid)
    return selected, dataclasses.replace(step, history=group)


def end_step(step: OpenStep, accepted: Int[Array, " R"] | None = None) -> HierarchyState:
    """Keep the new tokens, back their records up, and set the budgets of the next step.

    Args:
        step: the step, after the last layer.
        accepted: int32 how many of the T tokens of each request stay, the first ones; None: all.
            What the others wrote is never read. Less than 0 is 0, more than T is T.

    Raises:
        UserError: a layer has kept nothing in this step, or `accepted` has another form.
    """
    cfg = step.cfg
    kept = {max(layer, ~layer) for layer in step.written}
    missing = sorted(set(range(sum(cfg.geometry.layers_per_pool))) - kept)
    if missing:
        raise UserError(
            f"layers {missing} kept no rows in this step; layers_per_pool "
            f"{cfg.geometry.layers_per_pool} says that there are as many"
        )
    state = groups.close_group(_group_of(step), cfg, step.group)
    if accepted is None:
        accepted = jnp.full(cfg.requests, cfg.queries, jnp.int32)
    if accepted.shape != (cfg.requests,) or accepted.dtype != jnp.int32:
        raise UserError(
            f"accepted is {accepted.dtype} {accepted.shape}; it must be int32 ({cfg.requests},)"
        )
    possible = jnp.clip(accepted, 0, cfg.queries)
    checkify.debug_check(
        (possible == accepted).all(), f"accepted is not in the range 0 to {cfg.queries}"
    )
    return decode.finish_step(state, cfg, possible)


def _layers(cfg: HierarchyConfig, group: int) -> range:
    """Numbers of the layers of a group."""
    sizes = cfg.geometry.layers_per_pool
    if not 0 <= group < len(sizes):
        raise UserError(f"there is no group {group}; there are {len(sizes)}")
    return range(sum(sizes[:group]), sum(sizes[: group + 1]))


def _group_with(cfg: HierarchyConfig, layer: int) -> int:
    """The group of a layer."""
    for group in range(cfg.pools):
        if layer in _layers(cfg, group):
            return group
    sizes = cfg.geometry.layers_per_pool
    raise UserError(f"there is no layer {layer}; layers_per_pool {sizes} has {sum(sizes)}")


def _group_of(step: OpenStep) -> OpenGroup:
    if not isinstance(step.history, OpenGroup):
        raise UserError("no group has selected yet; the first layer of each gives `select`")
    return step.history


def _enter(step: OpenStep, layer: Layer, choice: Choice | None) -> tuple[OpenStep, Layer]:
    """The step with the group of a layer open, and the place of the layer in it."""
    if not isinstance(layer, int):
        if choice is not None:
            raise UserError("layers that are scanned over select before the scan: call `select`")
        _group_of(step)
        return step, layer - _layers(step.cfg, step.group)[0]
    group = _group_with(step.cfg, layer)
    if choice is not None:
        step = _open(step, group, choice)
    elif group != step.group:
        raise UserError(f"layer {layer} is the first one of group {group}; it must select")
    if layer in step.written:
        raise UserError(f"layer {layer} has kept its rows in this step; a layer does it once")
    written = (*step.written, layer)
    return dataclasses.replace(step, written=written), layer - _layers(step.cfg, group)[0]


def _open(step: OpenStep, group: int, choice: Choice) -> OpenStep:
    """The step with a group open, and the one before it closed."""
    cfg, state = step.cfg, step.history
    if group in step.opened:
        raise UserError(f"group {group} has selected in this step; only its first layer does")
    if isinstance(state, OpenGroup):
        state = groups.close_group(state, cfg, step.group)
    wrong = step.wrong
    if isinstance(choice, IndexInputs):
        check_index(cfg, choice)
        opened = groups.open_group(state, cfg, group, choice)
    else:
        with jax.named_scope("select"):
            selection, unseen = own_selection(state, cfg, step.positions, choice)
        checkify.debug_check(
            ~unseen.any(), f"group {group} selects positions that a query does not see"
        )
        opened, wrong = groups.open_selected(state, cfg, group, selection), wrong | unseen
    return dataclasses.replace(
        step, history=opened, wrong=wrong, group=group, opened=(*step.opened, group)
    )
