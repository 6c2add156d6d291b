"""Entries of a `config.json`, checked one by one. Knows nothing about what they mean."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.text import few

MTP_LAYERS = "num_nextn_predict_layers"
"""The entry with the number of layers that only propose tokens, behind those of the model."""

MOST = {
    "num_hidden_layers": 10_000,
    "n_routed_experts": 10_000,
    MTP_LAYERS: 10_000,
    "dspark_n_routed_experts": 10_000,
    "engram_max_ngram_size": 100,
    "engram_n_heads": 10_000,
}
"""What is listed one by one, before anything shows that the files have fewer of it."""


def refuse_other(raw: Mapping[str, Any], fixed: Mapping[str, object]) -> None:
    """Raises UserError where an entry has another value than the only one that is implemented."""
    for name, value in fixed.items():
        if raw.get(name, value) != value:
            raise UserError(f"{name} is {raw[name]!r}; only {value!r} is supported")


def refuse_unknown(raw: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UserError where an entry is set whose meaning is not known here."""
    off = (None, False, "", 0)
    unknown = sorted(name for name in raw if name not in known and raw[name] not in off)
    if unknown:
        raise UserError(f"unknown entries that may change what the model computes: {few(unknown)}")


def read_sizes(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Whole numbers by our names, from those published; all of them must be there."""
    missing = sorted(name for name in names.values() if name not in raw)
    if missing:
        raise UserError(f"the configuration lacks {len(missing)} entries: {', '.join(missing)}")
    return {ours: integer(raw, published) for ours, published in names.items()}


def integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An entry that must be a whole number."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} is {value!r}, expected a whole number")
    if value > MOST.get(name, value):
        raise UserError(f"{name} is {value:,}; more than {MOST[name]:,} cannot be")
    return value


def number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """An entry that must be a number."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}, expected a number")
    return float(value)


def flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """An entry that must be true or false."""
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}, expected true or false")
    return value
