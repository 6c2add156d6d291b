"""E0: every record is what it should be, wherever it is, and the plan covers exactly the selection.

What a record should be is what `resident` has on the device, which never read it from anywhere
else: so a record that is wrong in host memory and on the device alike is found too.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from dhisparse_jax.audit.findings import Difference, Level
from dhisparse_jax.audit.lockstep import Pair
from dhisparse_jax.audit.outputs import unequal
from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.hierarchy import layout
from dhisparse_jax.hierarchy.invariants import check_invariants, host_rows

Host = Any
"""A state, or a part of one, whose leaves are NumPy arrays."""


class Sizes(NamedTuple):
    """Sizes of the hierarchy under the policy, and under `resident`.

    Attributes:
        audited: those under the policy.
        resident: those under `resident`.
    """

    audited: HierarchyConfig
    resident: HierarchyConfig


def compare_records(pair: Pair, sizes: Sizes, level: Level) -> None:
    """Compare the selection and the state of a step with what they should be.

    Args:
        pair: the step.
        sizes: of both hierarchies; but for the hot pools they are the same.
        level: takes in what is found.
    """
    found: list[Difference] = []
    cfg = sizes.audited
    level.counts["steps"] += 1
    for pool in range(cfg.pools):
        rows = host_rows(pair.state, cfg, pool)
        for row in range(len(pair.names)):
            one = _Row(pair, sizes, pool, row, rows[row])
            for mine, wanted in one.chosen():
                found += [*_plan(one, mine, level), *_selected(one, mine, wanted, level)]
            found += _state(one, level)
    found += _lengths(pair)
    report = check_invariants(pair.state, cfg)
    level.counts["invariants"] += len(report)
    failed = [name for name, holds in report.items() if not holds]
    if failed:
        what = f"invariants do not hold: {', '.join(failed)}"
        found.append(Difference(what, step=pair.number))
    level.add(found)


class _Row:
    """One pool of one request in one step."""

    def __init__(
        self, pair: Pair, sizes: Sizes, pool: int, row: int, rows: Int[np.ndarray, " C"]
    ) -> None:
        self.pair, self.sizes, self.pool, self.row = pair, sizes, pool, row
        self.cfg, self.host_rows = sizes.audited, rows
        self.accepted = int(pair.accepted[row])
        self.rate = self.cfg.geometry.rate(pool)
        self.complete = (int(pair.start[row]) + self.accepted) // self.rate

    def chosen(self) -> Iterator[tuple[Any, Any]]:
        """Each selection of the group, a `Chosen` of one row, and that of `resident`."""
        seen = (self.pair.audited.seen[self.pool], self.pair.resident.seen[self.pool])
        for both in zip(*(one.chosen for one in seen), strict=True):
            mine, wanted = jax.tree.map(lambda leaf: leaf[self.row], both)
            yield mine, wanted

    def differ(self, what: str, record: int, word: int = 0, detail: str = "") -> Difference:
        """A difference of a record of this row, at an int32 word of it."""
        geometry = self.cfg.geometry
        stride = self.cfg.record_layout.row_stride(geometry.row.words)
        place = min(word // stride, geometry.layers_per_pool[self.pool] - 1)
        return Difference(
            what,
            request=self.pair.names[self.row],
            step=self.pair.number,
            layer=sum(len(seen.attended) for seen in self.pair.audited.seen[: self.pool]) + place,
            position=record * self.rate,
            detail=detail,
        )

    def unlike(
        self,
        what: str,
        record: Int[np.ndarray, " n"],
        mine: Int[np.ndarray, "n *W"],
        wanted: Int[np.ndarray, "n *V"],
    ) -> Iterator[Difference]:
        """The records that differ, each at its first word that does."""
        words = math.prod(mine.shape[1:])
        mine, wanted = (records.reshape(len(record), words) for records in (mine, wanted))
        differ = mine != wanted
        for at in np.flatnonzero(differ.any(axis=1)).tolist():
            words = np.flatnonzero(differ[at])
            detail = f"{len(words)} of {differ.shape[1]} words"
            yield self.differ(what, int(record[at]), int(words[0]), detail)

    def on_device(
        self, state: Host, cfg: HierarchyConfig
    ) -> tuple[Bool[np.ndarray, " n"], Int[np.ndarray, "n *W"]]:
        """Which complete records have a hot slot or a place in the tail, and what is there."""
        count = self.complete
        slot = state.pools[self.pool].slot_of[self.row, :count].copy()
        newest = np.arange(max(0, count - cfg.tail + cfg.fresh(self.pool)), count, dtype=np.int32)
        request = jnp.full_like(newest, self.row)
        slot[newest] = layout.tail_slot(cfg, self.pool, request, jnp.asarray(newest))
        return slot >= 0, state.hot[cfg.hot_pool_of(self.pool)[0]].slots[np.maximum(slot, 0)]


def _plan(one: _Row, mine: Host, level: Level) -> Iterator[Difference]:
    """Every selected record has one slot, no two share one, and nothing else was planned."""
    selection, location = mine.selection, mine.location
    level.counts["selected records"] += int((selection >= 0).sum())
    for query, k in np.argwhere((selection >= 0) != (location >= 0)).tolist():
        record = int(selection[query, k])
        what = "a selected record has no slot" if record >= 0 else "a slot was planned for nothing"
        yield one.differ(what, max(record, 0))
    chosen = selection >= 0
    pairs = np.unique(np.stack([selection[chosen], location[chosen]]), axis=1)
    yield from _shared(one, *pairs)
    counts = {name: int(count) for name, count in mine.counts._asdict().items()}
    level.counts["fetched records"] += counts["fetched"]
    distinct = len(np.unique(selection[chosen]))
    if not distinct == counts["selected"] == sum(counts[x] for x in ("hit", "tail", "fetched")):
        detail = f"{distinct} records are selected, the plan counts {counts}"
        yield one.differ("the plan does not cover the selection", one.complete, detail=detail)


def _shared(
    one: _Row, record: Int[np.ndarray, " n"], slot: Int[np.ndarray, " n"]
) -> Iterator[Difference]:
    """Slots that hold several records, and records with several slots; of distinct pairs."""
    for what, key in (("two records in one slot", slot), ("a record in two slots", record)):
        order = np.argsort(key, kind="stable")
        again = order[1:][key[order][1:] == key[order][:-1]]
        for at in again.tolist():
            yield one.differ(what, int(record[at]), detail=f"slot {int(slot[at])}")


def _selected(one: _Row, mine: Host, wanted: Host, level: Level) -> Iterator[Difference]:
    """What attention read equals its host bytes, and what `resident` read."""
    there = (mine.selection >= 0) & (mine.selection < one.complete)
    record, at = np.unique(mine.selection[there], return_index=True)
    host = one.pair.state.pools[one.pool].host
    row = one.host_rows[record]
    held = row < len(host)
    for lost in record[~held].tolist():
        yield one.differ("a selected record has no place in host memory", lost)
    read = mine.records[there][at]
    level.counts["records compared with host bytes"] += int(held.sum())
    what = "a record that was read is not its host record"
    yield from one.unlike(what, record[held], read[held], host[row[held]])
    own = np.arange(len(mine.selection)) < one.accepted
    for query in np.flatnonzero(own & (mine.selection != wanted.selection).any(axis=1)).tolist():
        position = int(one.pair.start[one.row]) + query
        yield one.differ("another selection than resident's", position // one.rate)
    same = own[:, None] & (mine.selection == wanted.selection) & (mine.selection >= 0)
    level.counts["records compared with resident's"] += int(same.sum())
    what = "a record that was read is not what resident read"
    yield from one.unlike(what, mine.selection[same], mine.records[same], wanted.records[same])


def _state(one: _Row, level: Level) -> Iterator[Difference]:
    """Every committed record and index key, in host memory and on the device, is `resident`'s."""
    state, reference = one.pair.state, one.pair.reference
    pool, every = state.pools[one.pool], np.arange(one.complete)
    yield from _shared(one, *_slots(pool.slot_of[one.row]))
    there, wanted = one.on_device(reference, one.sizes.resident)
    for lost in np.flatnonzero(~there).tolist():
        yield one.differ("resident lacks a record", lost)
    held = there & (one.host_rows[: one.complete] < len(pool.host))
    level.counts["host records"] += int(held.sum())
    what = "a host record is not what was written"
    yield from one.unlike(what, every[held], pool.host[one.host_rows[every[held]]], wanted[held])
    here, mine = one.on_device(state, one.cfg)
    both = here & there
    level.counts["device records"] += int(both.sum())
    what = "a record on the device is not what was written"
    yield from one.unlike(what, every[both], mine[both], wanted[both])
    for left in np.flatnonzero(pool.slot_of[one.row, one.complete :] >= 0).tolist():
        yield one.differ("a record that was not committed has a slot", one.complete + left)
    level.counts["index keys"] += one.complete
    keys = jax.tree.leaves((pool.index_keys, reference.pools[one.pool].index_keys))
    half = len(keys) // 2
    for ours, theirs in zip(keys[:half], keys[half:], strict=True):
        rows = (one.row, slice(one.complete))
        for record in np.flatnonzero(unequal(ours[rows][None], theirs[rows][None])[0]).tolist():
            yield one.differ("an index key is not resident's", record)


def _slots(slot_of: Int[np.ndarray, " C"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    record = np.flatnonzero(slot_of >= 0)
    return record, slot_of[record]


def _lengths(pair: Pair) -> Iterator[Difference]:
    """What was accepted is committed, and nothing else."""
    for row, name in enumerate(pair.names):
        wanted, length = int(pair.start[row] + pair.accepted[row]), int(pair.state.length[row])
        if length != wanted:
            what = "a rejected row is committed" if length > wanted else "an accepted row is lost"
            position = min(length, wanted)
            detail = f"the length is {length}, with what was accepted it is {wanted}"
            yield Difference(what, request=name, step=pair.number, position=position, detail=detail)
