"""Device memory of one decode GPU: what is in it, and how much of the load it can take.

One account: weights by kind, the state by kind, and room for what a step computes. See
`models.glm.costs` for what is on one GPU.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.memory import sizes
from dhisparse_jax.speculation.protocol import Drafter
from dhisparse_jax.speculation.schedule import UNION_GROWTH

WORKSPACE_BYTES = 2.3e9
"""For what a step computes, and what memory allocators lose."""

LOGITS_AT_ONCE = 8
"""Arrays of the size of the logits, float32, that accepting tokens holds at the same time: 2.13 GiB
were asked for at once with 45 requests and 8 queries (XLA, jax 0.11.2)."""

ROWS_UNIT = 256
"""Hot slots come in multiples of it."""

FIXED_ROWS = 2
"""Slots of `fixed` per request, in units of the top-K: HiSparse's default. With fewer, `adaptive`
fetches so much more that another request lowers the output of all."""


class Account(NamedTuple):
    """Bytes by kind; host pools are not on the device."""

    bytes: dict[str, float]
    host_bytes: int

    @property
    def device_bytes(self) -> float:
        """All of it."""
        return sum(self.bytes.values())


class Fit(NamedTuple):
    """How much of a load is on a GPU at the same time.

    Attributes:
        requests: that run; 0 if not even one fits.
        hot_rows: hot slots of each, per pool.
    """

    requests: int
    hot_rows: int


def account(
    weights: Mapping[str, int],
    vocabulary: int,
    cfg: HierarchyConfig,
    drafter: Drafter,
    draft_bytes: int,
) -> Account:
    """What is in memory, with weights and a draft of so many bytes."""
    state = sizes(cfg, drafter)
    logits_bytes = 4 * LOGITS_AT_ONCE * cfg.requests * cfg.queries * vocabulary
    kinds: dict[str, float] = dict(weights)
    if draft_bytes:
        kinds["draft"] = draft_bytes
    kinds |= {
        "hot records": state.hot_bytes,
        "tails": state.tail_bytes,
        "staging": state.staging_bytes,
        "index keys": state.index_bytes,
        "tables": state.table_bytes,
        "draft rings": state.draft_bytes,
        "windows": state.kept_bytes,
        "workspace": WORKSPACE_BYTES + logits_bytes,
    }
    return Account(kinds, state.host_bytes)


def fit(
    policy: Policy,
    requests: int,
    capacity: int,
    top_k: int,
    queries: int,
    fits: Callable[[Fit], bool],
) -> Fit:
    """As many requests as fit, and for `adaptive` the most hot slots that they can have.

    Args:
        policy: how budgets are set; `adaptive` takes in requests down to twice what a step of each
            is expected to select, which for one query is the budget of `fixed`.
        requests: that there are.
        capacity: positions of each.
        top_k: size of a selection.
        queries: of a step and request.
        fits: whether so many requests with so many hot slots fit; less of either fits too.
    """
    least = {
        Policy.RESIDENT: capacity,
        Policy.FIXED: min(capacity, FIXED_ROWS * top_k),
        Policy.ADAPTIVE: min(capacity, _twice_a_step(top_k, queries)),
    }[policy]
    running = _largest(requests, lambda count: fits(Fit(count, least)))
    if policy is not Policy.ADAPTIVE or not running:
        return Fit(running, least)
    units = _largest(
        math.ceil(capacity / ROWS_UNIT), lambda units: fits(Fit(running, units * ROWS_UNIT))
    )
    return Fit(running, max(least, units * ROWS_UNIT))


def _twice_a_step(top_k: int, queries: int) -> int:
    """Twice the rows that a step of so many queries is expected to select, in whole units."""
    return ROWS_UNIT * math.ceil(FIXED_ROWS * top_k * queries**UNION_GROWTH / ROWS_UNIT)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, as all below it do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
