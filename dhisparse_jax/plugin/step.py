"""One decode step of a model that calls the hierarchy itself.

`begin_step`, then `attend` (or `read`) once in every layer, group by group, and `end_step`. All of
it runs under `jit`, with the state donated. What layers hand on is an `OpenStep`, a pytree of one
structure within a group whose layers are scanned over:

    step = select(step, group, choice)                       # before the scan
    def layer(carry, number): ... attend(step, number, row, query) ...
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax import step as decode
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import group as groups
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.append import append_row, query_positions
from dhisparse_jax.hierarchy.layout import Layer
from dhisparse_jax.hierarchy.retrieve import Attended
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.plugin.choice import Choice
from dhisparse_jax.plugin.opened import OpenStep, check_open, enter, group_of, layers_of, open_
from dhisparse_jax.plugin.rows import Rows, flat, shape_of, unflat
from dhisparse_jax.plugin.sizes import check_state
from pallas_kernels.common.rows import gather_words, unpack
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.common.scaled_rows import decode as decode_rows


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
    if isinstance(state, OpenStep):
        raise UserError("a step has begun already: `end_step` comes before the next one")
    check_state(state, cfg)
    geometry = cfg.geometry
    if geometry.kept or geometry.rates or geometry.candidates:
        raise UserError("rates, kept and candidates of a Geometry are for models that are served")
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
    none = jnp.zeros(sum(geometry.layers_per_pool), bool)
    return OpenStep(positions=positions, wrong=beyond, given=none, history=state, cfg=cfg)


def select(step: OpenStep, group: int, choice: Choice) -> OpenStep:
    """Select for all layers of a group, without attending.

    For a group whose layers are scanned over; elsewhere the first layer hands its choice to
    `attend` or `read`.

    Args:
        step: the step.
        group: which group, from 0.
        choice: see `Choice`; positions up to each query's own, itself included. One that is named
            twice counts once.

    Raises:
        UserError: there is no such group, it has selected already, or the choice has another shape
            than the geometry says.
    """
    check_open(step)
    scanned = tuple(~layer for layer in layers_of(step.cfg, group))  # by which numbers is not known
    opened = open_(step, group, choice)
    history = groups.close_group(group_of(opened), step.cfg, group)
    complete = dataclasses.replace(group_of(opened), state=history, complete=True)
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
        layer: number of the layer in the model, from 0. An int32 array in a scan over the layers of
            a group that has selected; what comes of a number outside of it, or of one that has
            been, is NaN.
        row: rows of the new tokens: MLA `[R, T, width]`; GQA keys `[R, T, heads, key]` and values
            `[R, T, heads, value]`. They are stored as bytes, and have no gradient.
        query: queries `[R, T, H, key]`; of MLA absorbed ones, as wide as a row. Query head h reads
            head `h // (H / heads)` of the rows.
        select: what the first layer of a group selects, for all of it; None in the others. A
            position that is named twice counts once.

    Returns:
        `values [R, T, H, value]`: `softmax(scale * query . key) . value` over the selected rows in
        the dtype of `query`, zeros where there are none; `lse [R, T, H]`, with which attention over
        other rows can be merged; and the step to go on with.

    Raises:
        UserError: the layer cannot come now, an array is not as the geometry says, or a gradient is
            asked of the rows.
    """
    check_open(step)
    new, shape = step.positions.shape, shape_of("queries", query)
    if len(shape) != 4 or shape[:2] != new:
        wanted = f"({new[0]}, {new[1]}, heads, key)"
        raise UserError(f"queries have shape {shape}; they must have {wanted}")
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise UserError(f"queries are {query.dtype}, and so would be values; they must be floats")
    step, place = enter(step, layer, select)
    row = flat(step.cfg.geometry.row, row, new)
    attended, group = groups.attend(group_of(step), step.cfg, step.group, place, row, query)
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
    check_open(step)
    step, place = enter(step, layer, select)
    cfg, row_format = step.cfg, step.cfg.geometry.row
    row = flat(row_format, row, step.positions.shape)
    group = group_of(step)
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

    Where a scan left out a layer of its group, which only values show, rows of the new tokens are
    missing: all requests are full then, and give NaN from the next step on.

    Args:
        step: the step, after the last layer.
        accepted: int32 how many of the T tokens of each request stay, the first ones; None: all.
            What the others wrote is never read. Less than 0 is 0, more than T is T; and no more
            stay than the capacity has room for: queries beyond it got NaN.

    Raises:
        UserError: a layer has kept nothing in this step, or `accepted` has another form.
    """
    check_open(step)
    cfg = step.cfg
    kept = {max(layer, ~layer) for layer in step.written}
    missing = sorted(set(range(sum(cfg.geometry.layers_per_pool))) - kept)
    if missing:
        raise UserError(
            f"layers {missing} of layers_per_pool {cfg.geometry.layers_per_pool} kept no rows in "
            "this step: each calls attend or read, and hands on the step that it returns"
        )
    state = groups.close_group(group_of(step), cfg, step.group)
    if accepted is None:
        accepted = jnp.full(cfg.requests, cfg.queries, jnp.int32)
    shape = shape_of("accepted numbers", accepted)
    if shape != (cfg.requests,) or accepted.dtype != jnp.int32:
        raise UserError(f"accepted is {accepted.dtype} {shape}; it must be int32 ({cfg.requests},)")
    possible = jnp.clip(accepted, 0, cfg.queries)
    checkify.debug_check(
        (possible == accepted).all(), f"accepted is not in the range 0 to {cfg.queries}"
    )
    after = jnp.where(state.active, state.length + possible, 0).max()
    checkify.debug_check(
        after <= cfg.capacity,
        f"a request would keep {{}} positions, and the capacity is {cfg.capacity}: accept fewer",
        after,
    )
    whole = step.given.all()
    checkify.debug_check(whole, "a scan over the layers of a group left one of them out")
    state = decode.finish_step(state, cfg, possible)
    full = jnp.where(state.active & ~whole, cfg.capacity, state.length)
    return dataclasses.replace(state, length=full)
