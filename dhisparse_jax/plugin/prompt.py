"""A request comes: with the rows of its prompt, which the model computed as it likes."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Float, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.admit import admit_prompt
from dhisparse_jax.hierarchy.formats import AnyKeys, no_keys, stored_keys, stored_rows
from dhisparse_jax.hierarchy.requests import join
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.plugin.rows import Rows, flat, shape_of
from dhisparse_jax.plugin.sizes import check_state
from pallas_kernels.common.record_layout import placed_words


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
    decode step. The row is free again after `leave`.

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
    geometry = cfg.geometry
    size, length = _sizes(cfg, rows, keys, length)
    check_state(state, cfg)
    if isinstance(request, int | np.integer) and not 0 <= request < cfg.requests:
        raise UserError(f"there is no row {request}; there are {cfg.requests} requests")
    request = jnp.asarray(request, jnp.int32)
    checkify.debug_check(
        (request >= 0) & (request < cfg.requests),
        f"there is no row {{}}; there are {cfg.requests} requests",
        request,
    )
    checkify.debug_check(
        ~state.active[request], "row {} is taken: `leave` comes before `admit`", request
    )
    state = join(state, cfg, request, length)
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


def _sizes(
    cfg: HierarchyConfig,
    rows: Sequence[Rows],
    keys: Sequence[Float[Array, "P index"]],
    length: Int[Array, ""] | int | None,
) -> tuple[int, Int[Array, ""]]:
    """P and the length, of a prompt that is complete."""
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
    count = int(length) if isinstance(length, int | np.integer) else size
    if not 0 <= count <= size <= cfg.capacity:
        raise UserError(
            f"a prompt of {count} positions in {size} rows; the capacity is {cfg.capacity}"
        )
    given = jnp.asarray(size if length is None else length, jnp.int32)
    possible = jnp.clip(given, 0, size)
    checkify.debug_check(possible == given, f"a length of {{}} in {size} rows", given)
    return size, possible


def _keys(cfg: HierarchyConfig, keys: Float[Array, "P index"] | None) -> AnyKeys:
    """Index keys as they are stored, one for every position of the capacity."""
    geometry = cfg.geometry
    if keys is None:
        return no_keys(geometry, cfg.capacity)
    return stored_keys(geometry, jnp.pad(keys, ((0, cfg.capacity - keys.shape[0]), (0, 0))))
