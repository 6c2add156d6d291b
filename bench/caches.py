"""Reference caches: which selected positions a cache of a given budget has to fetch, step by step.

One cache of one request, as an oracle in NumPy. All positions of a step are in the cache together,
so a step never evicts what it selects. A new position (one that is made in the step that selects it
first) takes a slot but is no fetch. Knows nothing of slots, pages, tails or staging.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

NEVER = 2**31 - 1


class Step(NamedTuple):
    """What a policy sees of a step.

    Attributes:
        number: which step it is, from 0.
        selected: its distinct positions.
        missed: those that were not in the cache.
        next_use: for each selected position, the next step that selects it, or NEVER.
        rng: source of randomness.
    """

    number: int
    selected: Int[np.ndarray, " n"]
    missed: Int[np.ndarray, " m"]
    next_use: Int[np.ndarray, " n"]
    rng: np.random.Generator


Policy = Callable[[Float[np.ndarray, " positions"], Step], None]
"""Updates the eviction keys of the positions: the smallest key is evicted first."""


def lru(keys: Float[np.ndarray, " positions"], step: Step) -> None:
    """Least recently selected first; within a step, what it lists last is the least recent."""
    keys[step.selected] = step.number - np.arange(len(step.selected)) / len(step.selected)


def fifo(keys: Float[np.ndarray, " positions"], step: Step) -> None:
    """What came in first goes first."""
    keys[step.missed] = step.number


def uniform(keys: Float[np.ndarray, " positions"], step: Step) -> None:
    """Every cached position is as likely to go."""
    keys[:] = step.rng.random(len(keys))


def belady(keys: Float[np.ndarray, " positions"], step: Step) -> None:
    """What is selected again last goes first: nothing misses less, but it takes the future."""
    keys[step.selected] = -step.next_use


POLICIES: dict[str, Policy] = {"lru": lru, "fifo": fifo, "random": uniform, "belady": belady}


def simulate(
    steps: Sequence[Int[np.ndarray, " n"]],
    policy: Policy,
    content: Int[np.ndarray, " budget"],
    history: int,
) -> list[Int[np.ndarray, " m"]]:
    """The positions that each step has to fetch.

    Args:
        steps: the distinct positions that each step selects.
        policy: who is evicted.
        content: what the cache holds before the first step, the most recent first. As many as it
            has slots.
        history: positions before the first step; those from here on are new.

    Raises:
        ValueError: if a step selects more positions than the cache has slots.
    """
    budget = len(content)
    rng = np.random.default_rng(0)
    next_use, first_use = _next_uses(steps)
    keys = np.zeros(len(first_use))
    keys[content] = -first_use[content] if policy is belady else -1.0 - np.arange(budget)
    cached = np.zeros(len(keys), np.bool_)
    cached[content] = True
    fetched = []
    for number, selected in enumerate(steps):
        if len(selected) > budget:
            raise ValueError(f"step {number} selects {len(selected)} of a cache of {budget}")
        missed = selected[~cached[selected]]
        policy(keys, Step(number, selected, missed, next_use[number], rng))
        cached[missed] = True
        cached[_victims(keys, cached, selected, budget)] = False
        made = (missed >= history) & (first_use[missed] == number)
        fetched.append(missed[~made])
    return fetched


def _next_uses(
    steps: Sequence[Int[np.ndarray, " n"]],
) -> tuple[list[Int[np.ndarray, " n"]], Int[np.ndarray, " positions"]]:
    """The next step that selects what each step selects, and the first step of each position."""
    following = np.full(max(int(step.max()) for step in steps) + 1, NEVER)
    next_use = []
    for number, selected in reversed(list(enumerate(steps))):
        next_use.append(following[selected])
        following[selected] = number
    return next_use[::-1], following


def _victims(
    keys: Float[np.ndarray, " positions"],
    cached: Bool[np.ndarray, " positions"],
    selected: Int[np.ndarray, " n"],
    budget: int,
) -> Int[np.ndarray, " v"]:
    """Cached positions to evict, smallest keys first, so that `budget` stay."""
    spare = cached.copy()
    spare[selected] = False
    candidates = np.flatnonzero(spare)
    excess = len(candidates) + len(selected) - budget
    if excess <= 0:
        return candidates[:0]
    return candidates[np.argpartition(keys[candidates], excess - 1)[:excess]]
