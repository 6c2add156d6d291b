"""Named inputs for `plan`, for tests and benchmarks: the same on every call.

Every case is a state that a hierarchy can be in: `slot_of` and `position` are inverse to each
other, a page belongs to one request, marks lie in the past, tails hold the newest positions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.plan.types import PlanInput, PlanTables, Tail

STEP = 100_000

LEAST_LENGTH, LEAST_PAGES = 40, 4
"""Tables have room for so much at least, so that small cases are of one shape."""


class Inputs(NamedTuple):
    """Arguments of `api.plan`."""

    wanted: PlanInput
    tables: PlanTables
    page_slots: int


def random(  # noqa: PLR0913  # what a state can be
    *,
    lengths: tuple[int, ...] = (40, 23, 5),
    pages: tuple[int, ...] = (4, 2, 3),
    page_slots: int = 4,
    queries: int = 1,
    top_k: int = 6,
    tail: int = 6,
    filled: float = 0.8,
    pick: str = "any",
    ages: int = 5,
) -> Inputs:
    """A random state, and what its next step wants.

    With few ages, victims tie.

    Args:
        lengths: committed positions of each request; 0 is an inactive request, which wants nothing.
        pages: pages that each request holds.
        page_slots: slots per page.
        queries: T.
        top_k: K.
        tail: length of the tail rings, at least 2 T.
        filled: share of the hot slots that hold a position.
        pick: what queries select, see `_pick`.
        ages: steps since slots were last used, at most.
    """
    rng = np.random.default_rng(0)
    table = _deal_pages(rng, pages)
    size = len(lengths)
    slots = _pages_dealt(pages) * page_slots
    slot_of = np.full((size, max(*lengths, LEAST_LENGTH) + queries), -1, np.int32)
    mark = STEP - rng.integers(1, ages + 1, slots, np.int32)
    oldest = np.maximum(np.array(lengths) + queries - tail, 0)
    for request in range(size):
        owned = table[request][table[request] >= 0, None] * page_slots + np.arange(page_slots)
        _fill(rng, slot_of[request], owned[rng.random(owned.shape) < filled], oldest[request])
    selection = np.stack(
        [
            _select(rng, length, queries, top_k, pick, slot_of[request] >= 0)
            for request, length in enumerate(lengths)
        ]
    )
    retiring = np.array(lengths)[:, None] + queries - tail + np.arange(queries)
    staging = slots + tail * size + np.arange(size * queries * top_k)
    wanted = PlanInput(
        selection=jnp.asarray(selection),
        tail=Tail(
            start=jnp.asarray(oldest, jnp.int32),
            first=slots + tail * jnp.arange(size, dtype=jnp.int32),
            length=jnp.int32(tail),
        ),
        retiring=_ids(retiring, (retiring >= 0) & (np.array(lengths) > 0)[:, None]),
        staging=jnp.asarray(staging.reshape(size, -1), jnp.int32),
        pages=jnp.asarray(table),
        step=jnp.int32(STEP),
    )
    tables = PlanTables(jnp.asarray(slot_of), _held(slot_of, slots), jnp.asarray(mark))
    return Inputs(wanted, tables, page_slots)


def _ids(ids: Int[np.ndarray, "*n"], keep: Bool[np.ndarray, "*n"]) -> Int[Array, "*n"]:
    return jnp.asarray(np.where(keep, ids, -1), jnp.int32)


def _held(slot_of: Int[np.ndarray, "R C"], slots: int) -> Int[Array, " slots"]:
    """The position in every slot: the inverse of `slot_of`."""
    position = np.full(slots, -1, np.int32)
    here = np.nonzero(slot_of >= 0)
    position[slot_of[here]] = here[1]
    return jnp.asarray(position)


def _pages_dealt(pages: tuple[int, ...]) -> int:
    return max(sum(pages), LEAST_PAGES * len(pages)) + 2


def _deal_pages(rng: np.random.Generator, pages: tuple[int, ...]) -> Int[np.ndarray, "R Pmax"]:
    """Page lists of each request out of shuffled ids; some ids stay free."""
    shuffled = rng.permutation(_pages_dealt(pages))
    table = np.full((len(pages), max(*pages, LEAST_PAGES) + 1), -1, np.int32)
    for request, count in enumerate(pages):
        first = sum(pages[:request])
        table[request, :count] = shuffled[first : first + count]
    return table


def _fill(
    rng: np.random.Generator,
    slot_of: Int[np.ndarray, " C"],
    slots: Int[np.ndarray, " n"],
    below: np.integer[Any],
) -> None:
    """Put random distinct positions below `below` into the slots, while there are any."""
    position = rng.permutation(below)[: len(slots)]
    slot_of[position] = slots[: len(position)]


def _select(
    rng: np.random.Generator,
    length: int,
    queries: int,
    top_k: int,
    pick: str,
    hot: Bool[np.ndarray, " C"],
) -> Int[np.ndarray, "T K"]:
    """Selections of one request, -1 at the end where there are fewer than K."""
    selection = np.full((queries, top_k), -1, np.int32)
    for query in range(queries if length else 0):
        seen = length + query + 1
        picked = _pick(rng, seen, top_k, query, pick, hot)
        selection[query, : len(picked)] = picked
    return selection


def _pick(
    rng: np.random.Generator,
    seen: int,
    top_k: int,
    query: int,
    pick: str,
    hot: Bool[np.ndarray, " C"],
) -> Int[np.ndarray, " n"]:
    """Up to K of the `seen` visible positions.

    any: distinct in a query. repeats: not even that. apart: no query shares one with another.
    newest: the last ones. hot: those on the device. cold: those that are not. outside: some of them
    among numbers that are no positions.
    """
    every = rng.permutation(seen)
    outside = np.array([-(2**31), -2, len(hot), len(hot) + 1, 2**31 - 1])
    choices = {
        "any": every,
        "repeats": rng.integers(0, seen, top_k),
        "apart": np.arange(seen)[query * top_k :],
        "newest": np.arange(seen)[::-1],
        "hot": every[hot[every]],
        "cold": every[~hot[every]],
        "outside": rng.permutation(np.concatenate([every[: top_k // 2], outside])),
    }
    return choices[pick][:top_k]


glm = partial(random, page_slots=16, tail=16, top_k=2048)
"""K and page size of GLM-5.x; `lengths` and `pages` set the load."""

several = partial(random, lengths=(200, 90, 60), pages=(25, 13, 4), top_k=40)
"""Slots for some blocks of 16."""

CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(glm, lengths=(6000, 3000), pages=(256, 128)),
    "any": random,
    "verify": partial(random, queries=3),
    "verify_repeats": partial(random, queries=3, pick="repeats"),
    "repeats": partial(random, pick="repeats"),
    "verify_apart": partial(random, queries=3, pick="apart"),
    "newest": partial(random, pick="newest"),
    "all_hits": partial(random, pick="hot"),
    "all_misses": partial(random, pick="cold"),
    "overflow": partial(random, pick="cold", pages=(1, 1, 1), top_k=12),
    "overflow_with_hits": partial(random, queries=3, pages=(2, 1, 1), top_k=8),
    "empty_slots": partial(random, filled=0.2),
    "only_empty_slots": partial(random, filled=0.0),
    "full": partial(random, filled=1.0),
    "no_pages": partial(random, pages=(0, 2, 0)),
    "one_slot_pages": partial(random, pages=(7, 5, 3), page_slots=1),
    "outside": partial(random, queries=3, pick="outside"),
    "lengths_0_and_1": partial(random, lengths=(0, 1, 40), queries=2),
    "less_history_than_k": partial(random, lengths=(3, 2, 7), queries=2, top_k=12),
    "inactive": partial(random, lengths=(0, 23, 0)),
    "nobody": partial(random, lengths=(0, 0, 0)),
    "all_in_tail": partial(random, lengths=(3, 5, 1), tail=8),
    "just_past_tail": partial(random, lengths=(6, 7, 8)),
    "minimal_tail": partial(random, queries=3, tail=6),
    "old": partial(several, filled=1.0, ages=1000),
    "old_misses": partial(several, filled=1.0, ages=30_000, pick="cold"),
    "as_old_as_powers": partial(several, filled=1.0, ages=9, pick="cold"),
    "many_ties": partial(several, filled=1.0, ages=1, pick="cold"),
    "as_many_victims_as_slots": partial(several, filled=1.0, pick="cold", top_k=100, ages=64),
    "some_blocks_empty": partial(several, lengths=(60, 30, 20), pick="newest"),
    "around_a_block": partial(several, pages=(17, 16, 15), page_slots=1, pick="cold", ages=9),
    "few_empty": partial(several, filled=0.97, ages=200, pick="cold", top_k=9),
}
