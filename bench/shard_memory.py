"""Device memory of a cell: what is in it, and how large hot pools may be.

One account: weights by kind, the state by kind, and room for what a step computes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bench.shard_cells import Cell
from bench.shard_setup import Setup
from dhisparse_jax.engine.memory import sizes
from dhisparse_jax.models.glm.costs import weight_bytes

WORKSPACE_BYTES = 2.5e9
"""For what a step computes, and what memory allocators lose."""

ROWS_UNIT = 256
"""Hot slots come in multiples of it."""


class Account(NamedTuple):
    """Bytes by kind; host pools are not on the device."""

    bytes: dict[str, float]
    host_bytes: int

    @property
    def device_bytes(self) -> float:
        """All of it."""
        return sum(self.bytes.values())


def account(setup: Setup, cell: Cell) -> Account:
    """What a cell has in memory."""
    config, drafter = setup.model.config, setup.drafter
    state = sizes(setup.config(cell), drafter)
    kinds: dict[str, float] = dict(weight_bytes(config, setup.model.experts))
    if drafter.length:
        kinds["draft"] = _size(setup.draft_params.inner["draft"])
    kinds["replayed"] = _size(setup.params.replay)
    kinds |= {
        "hot records": state.hot_bytes,
        "tails": state.tail_bytes,
        "staging": state.staging_bytes,
        "index keys": state.index_bytes,
        "tables": state.table_bytes,
        "draft rings": state.draft_bytes,
        "workspace": WORKSPACE_BYTES,
    }
    return Account(kinds, state.host_bytes)


def fitting_rows(setup: Setup, cell: Cell, limit: float) -> int:
    """Hot slots per request and pool that fit into so many bytes, at most the whole history."""
    most = max(1, math.ceil(setup.capacity / ROWS_UNIT))
    held = lambda units: dataclasses.replace(cell, hot_rows=units * ROWS_UNIT)
    fits = lambda units: _bytes(setup, held(units)) <= limit
    return ROWS_UNIT * _largest(most, fits)


def most_requests(setup: Setup, cell: Cell, limit: float) -> int:
    """Requests like the cell's that fit into so many bytes, at least one and at most its own."""
    served = lambda count: dataclasses.replace(cell, requests=count)
    return _largest(cell.requests, lambda count: _bytes(setup, served(count)) <= limit)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, as all below it do; 1 if none does."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _bytes(setup: Setup, cell: Cell) -> float:
    return account(setup, cell).device_bytes


def _size(tree: Any) -> int:  # noqa: ANN401  # any pytree
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
