"""Whether a state has the sizes that it is said to have."""

import jax

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
