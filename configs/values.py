"""Configurations from values that may be anything, and the checks that all of them share."""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from dhisparse_jax.configs.quantised import FLOAT, FORMATS
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import MeshShape

_PARTS: dict[str, type[Any]] = {"yarn": Yarn, "mesh": MeshShape}
"""Entries that have entries."""

_DTYPES = ("float32", "bfloat16", "float16")

_Config = TypeVar("_Config")


def config_of(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """A configuration from values that come from outside, and may be anything.

    Args:
        kind: The dataclass of the configuration.
        values: Its fields by name; lists stand for tuples, objects for their parts.

    Raises:
        UserError: A field is missing, unknown, of the wrong type, or no valid size.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    unknown, missing = sorted(values.keys() - fields.keys()), sorted(required - values.keys())
    if unknown:
        raise UserError(f"the configuration has unknown entries: {', '.join(unknown)}")
    if missing:
        raise UserError(f"the configuration lacks {len(missing)} entries: {', '.join(missing)}")
    tuples: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    for name, part in _PARTS.items():
        if isinstance(values.get(name), Mapping):
            tuples[name] = _part(name, part, values[name])
    hints = typing.get_type_hints(kind)
    for name, value in tuples.items():
        if not _fits(value, hints[name]):
            raise UserError(f"{name} is {value!r}, which is not of the expected type")
    return kind(**tuples)


def _part(name: str, kind: type[Any], values: Mapping[str, Any]) -> object:
    """An entry that has entries. Raises UserError where they are none of it."""
    try:
        return kind(**values)
    except TypeError as error:  # missing, unknown, or not a number
        raise UserError(f"{name} is {dict(values)!r}, which describes none: {error}") from error


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401  # any type form
    """Whether a value has the type of a field."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def check_counts(config: object, may_be_zero: Collection[str]) -> None:
    """Raises UserError where a size is not positive, except those that may switch a part off."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < 0 or (value == 0 and field.name not in may_be_zero):
            raise UserError(f"{field.name} is {value}; it must be positive")


def check_formats(param_dtype: str, expert_format: str) -> None:
    """Raises UserError where weights have a dtype or a format that is not known."""
    if param_dtype not in _DTYPES:
        raise UserError(f"param_dtype is {param_dtype!r}; use one of {', '.join(_DTYPES)}")
    if expert_format not in (FLOAT, *FORMATS):
        known = ", ".join((FLOAT, *FORMATS))
        raise UserError(f"expert_format is {expert_format!r}; use one of {known}")
