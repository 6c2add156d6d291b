"""A request comes, with the rows of its prompt, which the model computed as it likes; and leaves.

A program cannot refuse what only values show. A request that cannot come as it is said to leaves
nothing of what was in its row, and its row is full: all that it attends to is NaN.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout, requests
from dhisparse_jax.hierarchy.admit import admit_prompt
from dhisparse_jax.hierarchy.formats import AnyKeys, no_keys, stored_keys, stored_rows
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.plugin.rows import Rows, flat, shape_of
from dhisparse_jax.plugin.sizes import check_state, row_of, scalar
from pallas_kernels.common.record_layout import placed_words

_Given = TypeVar("_Given")


def admit(
    state: HierarchyState,
    cfg: HierarchyConfig,
    request: Int[Array, ""] | int,
    rows: Sequence[Rows] = (),
    keys: Sequence[Float[Array, "P index"]] = (),
    length: Int[Array, ""] | int | None = None,
) -> HierarchyState:
    """Take a request into a free row, with what its prompt left in every layer.

    Run it under `jit`, with the state donated; prompts that are padded to one P share a program.
    Without rows the request starts at position 0, and its prompt can go through the model's own
    decode step. The row is free again after `leave`. A row that was taken is taken from whoever had
    it, and gives NaN, as one does whose `length` cannot be, or whose index keys are no numbers.

    Args:
        state: the hierarchy.
        cfg: its sizes; static.
        request: row of the request.
        rows: rows of the prompt, layer by layer: MLA `[P, width]`; GQA keys `[P, heads, key]` and
            values `[P, heads, value]`; bytes uint8 `[P, size]`.
        keys: index keys of the prompt, group by group, if the geometry has any.
        length: positions of the prompt, at most P; None: P.

    Raises:
        UserError: the state is of other sizes, there is no such row, rows are not those of all
            layers, keys not those of all groups, one of them is not as the geometry says, or the
            prompt is longer than the capacity.
    """
    check_state(state, cfg)
    geometry = cfg.geometry
    rows, keys = _listed("rows", "layers", rows), _listed("index keys", "groups", keys)
    size, length, possible = _sizes(cfg, rows, keys, length)
    request, there = row_of(request, cfg)
    free = ~state.active[request]
    checkify.debug_check(free, "row {} is taken: `leave` comes before `admit`", request)
    state = requests.leave(state, cfg, request)
    full = jnp.where(there & free & possible, length, cfg.capacity)
    state = requests.join(state, cfg, request, full)
    layer = 0
    for pool, layers in enumerate(geometry.layers_per_pool):
        mine = rows[layer : layer + layers]
        room = jnp.zeros((cfg.capacity, *cfg.record_shape(pool)), jnp.int32)
        for place, each in enumerate(mine):
            words = stored_rows(geometry.row, flat(geometry.row, each, (size,)))
            first_word = place * layout.row_stride(geometry, room)
            words, at = placed_words(words, first_word, cfg.record_layout)
            room = lax.dynamic_update_slice(room, words, (0, *at))
        stored = _keys(cfg, keys[pool] if keys else None)
        state = admit_prompt(state, cfg, pool, request, room, stored)
        layer += layers
    return state


def leave(
    state: HierarchyState, cfg: HierarchyConfig, request: Int[Array, ""] | int
) -> HierarchyState:
    """Free the row of a request: its pages come back, its records are forgotten.

    Of a row that is free already nothing changes, and neither does anything for a row that only its
    value shows not to be there; `checkify` names both. Run it under `jit`, with the state donated.

    Args:
        state: the hierarchy.
        cfg: its sizes; static.
        request: row of the request.

    Raises:
        UserError: the state is of other sizes, or there is no such row.
    """
    check_state(state, cfg)
    row, there = row_of(request, cfg)
    taken = ~there | state.active[row]
    checkify.debug_check(taken, "row {} is free: there is nobody who could leave", row)
    beyond = jnp.int32(cfg.requests)  # what is written there is dropped
    return requests.leave(state, cfg, jnp.where(there, row, beyond))


def _listed(what: str, of: str, given: Iterable[_Given]) -> tuple[_Given, ...]:
    """What is given for each layer or group. Raises UserError where it is one array."""
    if hasattr(given, "shape"):
        raise UserError(f"{what} are one array; give a list, with those of all {of}")
    return tuple(given)


def _sizes(
    cfg: HierarchyConfig,
    rows: Sequence[Rows],
    keys: Sequence[Float[Array, "P index"]],
    length: Int[Array, ""] | int | None,
) -> tuple[int, Int[Array, ""], Bool[Array, ""]]:
    """P, the length, and whether that can be, of a prompt that is complete."""
    layers, groups = sum(cfg.geometry.layers_per_pool), cfg.pools
    if not rows and (keys or (length is not None and not (isinstance(length, int) and not length))):
        raise UserError("a prompt without rows: give those of all layers, or start at length 0")
    if rows and len(rows) != layers:
        raise UserError(f"rows of {len(rows)} layers; layers_per_pool has {layers}")
    wanted = groups if rows and cfg.geometry.index_width else 0
    if len(keys) != wanted:
        raise UserError(f"index keys of {len(keys)} groups; there must be {wanted}")
    first = rows[0] if rows else None
    part = first[0] if isinstance(first, tuple) else first
    size = 0 if part is None else (*shape_of("rows", part), 0)[0]
    for key in keys:
        if shape_of("index keys of a group", key) != (size, cfg.geometry.index_width):
            shape = (size, cfg.geometry.index_width)
            raise UserError(f"index keys have shape {key.shape}; they must have {shape}")
    count = length if isinstance(length, int | np.integer) else size
    if size > cfg.capacity:
        raise UserError(
            f"a prompt has {size} rows, padding included, and the capacity is {cfg.capacity}"
        )
    if not 0 <= count <= size:
        raise UserError(f"a prompt has a length of {count}, and {size} rows")
    given = scalar("length", size if length is None else length)
    possible = (given >= 0) & (given <= size)
    checkify.debug_check(possible, f"a length of {{}} in {size} rows", given)
    for group, key in enumerate(keys):
        finite = jnp.isfinite(key).all(axis=-1) | (jnp.arange(size) >= given)
        checkify.debug_check(finite.all(), f"index keys of group {group} are no numbers")
        possible = possible & finite.all()
    return size, jnp.clip(given, 0, size), possible


def _keys(cfg: HierarchyConfig, keys: Float[Array, "P index"] | None) -> AnyKeys:
    """Index keys as they are stored, one for every position of the capacity."""
    geometry = cfg.geometry
    if keys is None:
        return no_keys(geometry, cfg.capacity)
    return stored_keys(geometry, jnp.pad(keys, ((0, cfg.capacity - keys.shape[0]), (0, 0))))
