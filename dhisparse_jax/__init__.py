"""Sparse-attention decoding over a KV hierarchy, in JAX.

plugin          the hierarchy in place of the cache of a Flax model of your own
hierarchy       the state and its pure functions
forward, finish_step, decode_step   the two halves of a decode step, and the whole
Engine, Request, Sampling           continuous batching of requests over a hierarchy
Draft, Drafter, Proposal            a small model that proposes tokens, and what it proposes
Geometry, RowFormat, HierarchyConfig, Policy, IndexInputs   what they are told
UserError       bad input, as one line that says what to change
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dhisparse_jax import hierarchy as hierarchy
    from dhisparse_jax import plugin as plugin
    from dhisparse_jax.config import HierarchyConfig as HierarchyConfig
    from dhisparse_jax.config import Policy as Policy
    from dhisparse_jax.engine.engine import Engine as Engine
    from dhisparse_jax.engine.request import Request as Request
    from dhisparse_jax.errors import UserError as UserError
    from dhisparse_jax.geometry import Geometry as Geometry
    from dhisparse_jax.geometry import RowFormat as RowFormat
    from dhisparse_jax.hierarchy.select import IndexInputs as IndexInputs
    from dhisparse_jax.sampling import Sampling as Sampling
    from dhisparse_jax.speculation.protocol import Draft as Draft
    from dhisparse_jax.speculation.protocol import Drafter as Drafter
    from dhisparse_jax.speculation.protocol import Proposal as Proposal
    from dhisparse_jax.step import decode_step as decode_step
    from dhisparse_jax.step import finish_step as finish_step
    from dhisparse_jax.verify import forward as forward

_HOMES = {
    "Geometry": "geometry",
    "HierarchyConfig": "config",
    "Policy": "config",
    "Proposal": "speculation.protocol",
    "RowFormat": "geometry",
    "Draft": "speculation.protocol",
    "Drafter": "speculation.protocol",
    "Engine": "engine.engine",
    "Request": "engine.request",
    "UserError": "errors",
    "IndexInputs": "hierarchy.select",
    "Sampling": "sampling",
    "decode_step": "step",
    "finish_step": "step",
    "forward": "verify",
}


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that `dhisparse --help` does not wait for JAX."""
    if name in ("hierarchy", "plugin"):
        return importlib.import_module(f"dhisparse_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dhisparse_jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Also the names that are not imported yet."""
    return sorted({*globals(), *_HOMES, "hierarchy", "plugin"})
