"""What a group attends to: by the index keys of the hierarchy, or as the model itself chose."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.select import IndexInputs
from dhisparse_jax.hierarchy.state import HierarchyState
from dhisparse_jax.plugin.rows import shape_of
from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, masked

Choice = IndexInputs | Shaped[Array, "..."]
"""What an indexer computed, or int32 positions `[R, T, n]`, at most K, in any order, -1 for none.

Its shape is checked here, with a message, and not by its type."""


def check_index(cfg: HierarchyConfig, index: IndexInputs) -> None:
    """Refuse what the index keys of the hierarchy are not for.

    Raises:
        UserError: the geometry has no index keys, or shapes are others than it says.
    """
    geometry = cfg.geometry
    if not geometry.index_width:
        raise UserError("index_width is 0: select by positions, or give the geometry index keys")
    if index.keys is None:
        raise UserError("a group selects with the index keys of its new tokens")
    heads = index.queries.shape[2] if index.queries.ndim == 4 else 1
    new = cfg.requests, cfg.queries
    for name, found, wanted in (
        ("queries", index.queries.shape, (*new, heads, geometry.index_width)),
        ("weights", index.weights.shape, (*new, heads)),
        ("keys", index.keys.shape, (*new, geometry.index_width)),
    ):
        if found != wanted:
            raise UserError(f"index {name} have shape {found}; they must have {wanted}")
        if not jnp.issubdtype(getattr(index, name).dtype, jnp.floating):
            raise UserError(f"index {name} are {getattr(index, name).dtype}; they must be floats")


def not_finite(index: IndexInputs) -> Bool[Array, "R T"]:
    """Tokens whose queries, weights or keys are infinite or no numbers: nothing scores by them."""
    assert index.keys is not None  # checked
    parts = jnp.isfinite(index.queries), jnp.isfinite(index.weights), jnp.isfinite(index.keys)
    first, *others = (part.all(axis=tuple(range(2, part.ndim))) for part in parts)
    for other in others:
        first = first & other
    return ~first


def own_selection(
    state: HierarchyState,
    cfg: HierarchyConfig,
    positions: Int[Array, "R T"],
    chosen: Shaped[Array, "..."],
) -> tuple[Int[Array, "R T K"], Bool[Array, "R T"]]:
    """A model's own selection as plans take it, and which queries name what they do not see.

    A position that is named twice counts once. Requests that are not there select nothing.

        In:  chosen [9, 2, -1, 2], at position 10, K = 5      Out: [2, 9, -1, -1, -1], False

    Raises:
        UserError: it has not the shape or dtype of a selection, or more than K positions.
    """
    most = cfg.geometry.top_k
    shape, wanted = shape_of("selected positions", chosen), f"int32 {(*positions.shape, most)}"
    if len(shape) != 3 or shape[:2] != positions.shape or chosen.dtype != jnp.int32:
        raise UserError(f"a selection is {wanted}, not {chosen.dtype} {shape}")
    chosen = jnp.asarray(chosen)
    if chosen.shape[2] > most:
        raise UserError(f"a query selects {chosen.shape[2]} positions; top_k is {most}: raise it")
    visible = (chosen >= 0) & (chosen <= positions[..., None])
    wrong = state.active[:, None] & (~visible & (chosen != NO_SLOT)).any(axis=-1)
    kept = visible & state.active[:, None, None]
    ordered = jnp.sort(jnp.where(kept, chosen, INT32_MAX), axis=-1)
    before = jnp.pad(ordered[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=NO_SLOT)
    once = jnp.sort(jnp.where(ordered == before, INT32_MAX, ordered), axis=-1)
    padding = ((0, 0), (0, 0), (0, most - chosen.shape[2]))
    return jnp.pad(masked(once, once < INT32_MAX), padding, constant_values=NO_SLOT), wrong
