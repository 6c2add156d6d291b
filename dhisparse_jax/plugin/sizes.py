"""Whether a state has the sizes that it is said to have, and a row is one of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.errors import UserError
from dhisparse_jax.geometry import Geometry
from dhisparse_jax.hierarchy import state as states
from dhisparse_jax.hierarchy.places import check_config, name_of
from dhisparse_jax.hierarchy.state import HierarchyState

AGAIN = "make one by init with this cfg"
"""What helps where a state and a configuration do not agree."""


def check_state(state: HierarchyState, cfg: HierarchyConfig) -> None:
    """Whether a state has the sizes of a configuration.

    Raises:
        UserError: it was made by another one, with the first thing that differs; or it is none.
    """
    check_config(cfg)
    if not isinstance(state, HierarchyState):
        raise UserError(f"the state is a {type(state).__name__}; it must be what init returns")
    if cfg.host_page_count < cfg.requests * cfg.row_pages:
        raise UserError(
            f"host_pages is {cfg.host_pages}, which only an Engine deals out: leave it out, so "
            f"that {cfg.requests} requests have {cfg.row_pages} pages each"
        )
    _check_geometry(state.geometry, cfg.geometry)
    wanted, wanted_form = jax.tree_util.tree_flatten_with_path(states.abstract(cfg))
    found, form = jax.tree_util.tree_flatten_with_path(state)
    if form != wanted_form:
        one_has = {name_of(path) for path, _ in found} ^ {name_of(path) for path, _ in wanted}
        what = "record_selections" if "selection" in one_has else "policy"
        raise UserError(f"the state is of another {what} than cfg's {getattr(cfg, what)}: {AGAIN}")
    for (path, leaf), (_, like) in zip(found, wanted, strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise UserError(
                f"the state's {name_of(path)} is {leaf.dtype} {leaf.shape}, and cfg says "
                f"{like.dtype} {like.shape}: {AGAIN}"
            )


def _check_geometry(found: Geometry, wanted: Geometry) -> None:
    for field in dataclasses.fields(Geometry):
        mine, other = getattr(found, field.name), getattr(wanted, field.name)
        if mine != other:
            raise UserError(
                f"the state was made for {field.name} {mine}, and cfg says {other}: {AGAIN}"
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
