"""The one way to declare a state pytree. Knows nothing about what the state holds."""

import dataclasses
from typing import TypeVar

import jax
from typing_extensions import dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def state(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen, keyword-only dataclass registered as a JAX pytree.

    States hold arrays only and have no `__post_init__`: JAX rebuilds them with specs, `None` or
    `ShapeDtypeStruct` leaves, so validation lives in `hierarchy.invariants` instead.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    cls.__no_type_check__ = True  # type: ignore[attr-defined]  # leaves are not always arrays
    return jax.tree_util.register_dataclass(cls)
