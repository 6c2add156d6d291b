"""Named inputs for `retrieve_attend`, for tests and benchmarks: the same on every call.

Words that attention must not read are random: nearly every row of them has a NaN. Such are also the
slots whose records are missing, until they have been fetched.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, POISON
from pallas_kernels.common.rows import words_of
from pallas_kernels.common.scaled_rows import ScaledRow
from pallas_kernels.retrieve.cases import words
from pallas_kernels.retrieve.types import Fetches, Moves
from pallas_kernels.sparse_attention import cases as attention_cases


class Inputs(NamedTuple):
    """Arguments of `api.retrieve_attend`, and what they come to.

    Attributes:
        host: the host pool.
        slots: the slots before.
        fetches: what is missing, by position.
        missing: the positions of the fetches.
        selection: positions that each query selects, by position.
        moves: slots to copy to other slots.
        after: arguments of `sparse_attention` once the records are there: its slots are the result.
    """

    host: Int[np.ndarray, "N W"]
    slots: Int[np.ndarray, "S W"]
    fetches: Fetches
    missing: Int[np.ndarray, "R U"]
    selection: Int[np.ndarray, "R T K"]
    moves: Moves | None
    after: attention_cases.Inputs


def random(  # noqa: PLR0913  # one name per dimension
    *,
    rows: Callable[..., attention_cases.Inputs] = attention_cases.glm,
    selected: tuple[int, ...] = (150, 70),
    queries: int = 1,
    heads: int = 8,
    top_k: int = 150,
    missing: float = 0.3,
    first: int = 0,
    room: int = 1,
    layer: int = 0,
) -> Inputs:
    """Requests with slots of their own; what a request selects is in random ones of them.

    Args:
        rows: makes queries and rows.
        selected: how many positions each request selects.
        queries: T; query t selects every (t + 1)-th of them.
        heads: H.
        top_k: K.
        missing: share of the selected records that are not in their slots.
        first: entry of the selection from which on records may be missing.
        room: entries in a list of fetches, in units of K; those that do not count name slots too.
        layer: the rows are those of this layer of a record.
    """
    rng = np.random.default_rng(0)
    requests, capacity = len(selected), 2 * top_k + 8
    # One request with so many heads and distinct slots is then cut into several.
    every = requests * top_k
    made = rows(
        requests=1,
        heads=requests * queries * heads,
        top_k=every,
        slots=every + 8,
        selected=(every,),
        layer=layer,
    )
    chosen = np.arange(top_k) < np.array(selected)[:, None]
    ids = np.where(chosen, made.location.reshape(requests, top_k), NO_SLOT)
    drawn = [np.sort(rng.choice(capacity, top_k, replace=False)) for _ in selected]
    positions = np.where(chosen, np.stack(drawn).astype(np.int32), NO_SLOT)
    after = made._replace(
        query=made.query.reshape(requests, queries, heads, -1),
        slots=_records(rng, made, ids),
        location=_per_query(ids, queries),
    )
    absent = chosen & (rng.random(ids.shape) < missing) & (np.arange(top_k) >= first)
    host, slots = words(rng, requests * capacity, made.slots.shape[1]), after.slots.copy()
    row_of = rng.permutation(len(host)).reshape(requests, capacity)
    host[np.take_along_axis(row_of, positions, axis=1)[absent]] = slots[ids[absent]]
    slots[ids[absent]] = words(rng, int(absent.sum()), slots.shape[1])
    uncounted = rng.integers(0, capacity, (requests, room * top_k)).astype(np.int32)
    wanted, targets = _missing(uncounted, positions, ids, absent)
    lists = np.take_along_axis(row_of, wanted, axis=1), targets, absent.sum(axis=1)
    fetches = Fetches(*(jnp.asarray(part, jnp.int32) for part in lists))
    return Inputs(host, slots, fetches, wanted, _per_query(positions, queries), None, after)


def _records(
    rng: np.random.Generator, made: attention_cases.Inputs, ids: Int[np.ndarray, "R K"]
) -> Int[np.ndarray, "S W"]:
    """Random records, with the rows that are selected in place."""
    row = made.row_format
    width = row.words if isinstance(row, ScaledRow) else words_of(made.rows.shape[1], row)
    read, columns = ids[ids != NO_SLOT], slice(made.offset, made.offset + width)
    records = words(rng, *made.slots.shape)
    records[read, columns] = made.slots[read, columns]
    return records


def _per_query(ids: Int[np.ndarray, "R K"], queries: int) -> Int[np.ndarray, "R T K"]:
    out = np.full((ids.shape[0], queries, ids.shape[1]), NO_SLOT, np.int32)
    for query in range(queries):
        some = ids[:, :: query + 1]
        out[:, query, : some.shape[1]] = some
    return out


def _missing(
    uncounted: Int[np.ndarray, "R U"],
    positions: Int[np.ndarray, "R K"],
    ids: Int[np.ndarray, "R K"],
    absent: Bool[np.ndarray, "R K"],
) -> tuple[Int[np.ndarray, "R U"], Int[np.ndarray, "R U"]]:
    """Positions and slots of what is absent, at the front; behind it, what must not be read."""
    from_, to = uncounted.copy(), np.tile(ids, uncounted.shape[1] // ids.shape[1])
    for request, which in enumerate(absent):
        count = which.sum()
        from_[request, :count], to[request, :count] = positions[request, which], ids[request, which]
    return from_, to


def row_out_of_range() -> Inputs:
    """The last record that the first request selects does not exist: its slot becomes POISON."""
    inputs = random(missing=1.0)
    fetches, after = inputs.fetches, inputs.after
    last = int(fetches.counts[0]) - 1
    target = int(fetches.targets[0, last])
    after.slots[target], after.rows[target] = POISON, np.nan
    rows = fetches.rows.at[0, last].set(len(inputs.host))
    return inputs._replace(fetches=fetches._replace(rows=rows))


def targets_out_of_range() -> Inputs:
    """Some records have no slot: nobody attends to them, and the slots that they had stay."""
    inputs = random(missing=1.0)
    fetches, after = inputs.fetches, inputs.after
    which = np.array([3, 70, 71, 149])
    none = jnp.array([len(inputs.slots), -2, NO_SLOT, INT32_MAX], jnp.int32)
    had = np.asarray(fetches.targets)[0, which]
    after.slots[had] = inputs.slots[had]
    after.location[0, 0, which] = NO_SLOT
    return inputs._replace(fetches=fetches._replace(targets=fetches.targets.at[0, which].set(none)))


def moved() -> Inputs:
    """Some records that are not missing lie in slots that nobody selects, and are moved first."""
    inputs = random()
    slots, after = inputs.slots, inputs.after
    spare = np.setdiff1d(np.arange(len(slots)), after.location)[:6]
    there = np.flatnonzero((slots == after.slots).all(axis=1))
    targets = np.intersect1d(there, after.location)[:6]
    slots[spare] = after.slots[spare] = after.slots[targets]
    slots[targets] = words(np.random.default_rng(1), len(targets), slots.shape[1])
    ids = [[*spare, NO_SLOT, spare[0]], [*targets, there[-1], NO_SLOT]]
    return inputs._replace(moves=Moves(*jnp.array(ids, jnp.int32)))


CASES: dict[str, Callable[[], Inputs]] = {
    "glm_small": partial(random, top_k=64, selected=(64, 50)),
    "glm_group": partial(random, layer=3),
    "glm_fp8": partial(random, rows=attention_cases.fp8),
    "glm_fp8_group": partial(random, rows=attention_cases.fp8, layer=2, heads=64),
    "glm_long": partial(random, heads=64, top_k=1100, selected=(1100, 700)),
    "nothing_missing": partial(random, missing=0.0),
    "everything_missing": partial(random, missing=1.0),
    "whole_blocks": partial(random, top_k=128, selected=(128, 64)),
    "one_block_and_one_row": partial(random, top_k=65, selected=(65, 64), missing=1.0),
    "only_in_the_last_block": partial(random, first=128, missing=1.0),
    "few_of_long_lists": partial(random, missing=0.02, room=4),
    "an_empty_selection": partial(random, selected=(150, 0, 70)),
    "padded_requests": partial(random, selected=(130, 0, 0, 0)),
    "nothing_selected": partial(random, selected=(0, 0)),
    "row_out_of_range": row_out_of_range,
    "targets_out_of_range": targets_out_of_range,
    "moved": moved,
    "float32": partial(random, rows=attention_cases.random, top_k=20, selected=(20, 7), layer=1),
    "glm_two_queries": partial(random, queries=2),
}
