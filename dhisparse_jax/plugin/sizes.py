"""Whether a state has the sizes that it is said to have, and a row is one of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy import state as states
from dhisparse_jax.hierarchy.places import name_of
from dhisparse_jax.hierarchy.state import HierarchyState


def check_state(state: HierarchyState, cfg: HierarchyConfig) -> None:
    """Whether a state has the sizes of a configuration.

    Raises:
        UserError: it was made by another one; with the first array that differs.
    """
    if not isinstance(cfg, HierarchyConfig):
        raise UserError(f"cfg is a {type(cfg).__name__}; it must be a HierarchyConfig")
    wanted, wanted_form = jax.tree_util.tree_flatten_with_path(states.abstract(cfg))
    found, form = jax.tree_util.tree_flatten_with_path(state)
    if form != wanted_form:
        raise UserError("the state is of another geometry: make one by init with this cfg")
    for (path, leaf), (_, like) in zip(found, wanted, strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise UserError(
                f"the state's {name_of(path)} is {leaf.dtype} {leaf.shape}, and cfg says "
                f"{like.dtype} {like.shape}: make one by init with this cfg"
            )


def row_of(
    request: Int[Array, ""] | int, cfg: HierarchyConfig
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """A row as an array, the nearest one there is, and whether it is the one that is meant.

    Raises:
        UserError: it is no number of a row, as far as can be seen.
    """
    if isinstance(request, int | np.integer) and not 0 <= request < cfg.requests:
        raise UserError(f"there is no row {request}; there are {cfg.requests} requests")
    row = scalar("a row", request)
    there = (row >= 0) & (row < cfg.requests)
    checkify.debug_check(there, f"there is no row {{}}; there are {cfg.requests} requests", row)
    return jnp.clip(row, 0, cfg.requests - 1), there


def scalar(what: str, number: Int[Array, ""] | int) -> Int[Array, ""]:
    """A whole number as an int32 array.

    Raises:
        UserError: it is none.
    """
    known: Any = number if hasattr(number, "dtype") else np.asarray(number)
    if known.shape or not jnp.issubdtype(known.dtype, jnp.integer):
        raise UserError(f"{what} is {known.dtype} {known.shape}; it must be one whole number")
    return jnp.asarray(number, jnp.int32)
