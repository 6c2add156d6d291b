"""The slots that may be overwritten, the longest unused first.

A launch of its own gathers the age of every slot (pages, then two words per slot), a program per
block of a request's slots, and counts those of at least each power of two. So the program of the
request knows within a factor of two how old its victims are, where the first of them is, and how
many slots are empty, before it reads an age. It reads the ages each time that their range is cut: a
few times in practice, and never while there are enough empty slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common.triton_select import middle, ranks, taken
from pallas_kernels.plan.triton_blocks import (
    Asked,
    Held,
    Kept,
    Made,
    Sizes,
    Surveyed,
    Word,
    gather,
    gather_slots,
    launch,
    only,
    scatter,
    store_block,
)

POWERS = 31
"""Ages are counted from 2**0 (all that is free) to 2**30 (all that is empty)."""

EMPTY = 2 ** (POWERS - 1)
"""Age of an empty slot: older than any other."""

NOT_HELD = -1
"""Age of what is no slot of the request. A slot of the working set has age 0."""

USED = POWERS
"""Where the slots of the working set are counted, behind the powers."""

TOGETHER = 8
"""Counts that are made at the same time."""


class Survey(NamedTuple):
    """The slots of a request, by numbers.

    Attributes:
        figures: slots of at least each power of two, and those of the working set, by block.
        total: the same of all blocks.
    """

    figures: Int[Array, "blocks figures"]
    total: Int[Array, " figures"]

    @property
    def blocks(self) -> jax.Array:
        """How many blocks the request has slots in: the first ones, since its pages are listed."""
        which = lax.broadcasted_iota(jnp.int32, self.figures.shape, 1)
        held = jnp.where((which == 0) | (which == USED), self.figures, 0)
        return jnp.sum((jnp.sum(held, axis=1) > 0).astype(jnp.int32))

    @property
    def used(self) -> jax.Array:
        """Slots of the working set."""
        return _at(self.total, USED)

    @property
    def free(self) -> jax.Array:
        """The others."""
        return _at(self.total, 0)

    @property
    def empty(self) -> jax.Array:
        """Those of the free that hold nothing."""
        return _at(self.total, POWERS - 1)


def survey(pages: Word, step: Word, kept: Kept, sizes: Sizes) -> Surveyed:
    """Ages of all slots, in the order of the page lists, and counts of them by block."""
    blocks = sizes.slot_blocks
    _, made = launch(
        _survey_kernel,
        sizes,
        Held(pages=pages, position=kept.position, mark=kept.mark, step=step),
        (),
        Surveyed(
            ages=(sizes.requests, blocks * sizes.tuning.slots),
            figures=(sizes.requests, blocks * (POWERS + 1)),
        ),
        blocks=blocks,
        warps=sizes.tuning.warps,
    )
    return made


def _survey_kernel(
    held: Held, _: tuple[()], __: tuple[()], made: Surveyed, *, sizes: Sizes
) -> None:
    row, block = pl.program_id(0), pl.program_id(1)
    page = _pages(held.pages, row, block, sizes)
    slot = _slots(page, block, sizes)
    position, mark = (gather_slots(ref, slot, page >= 0) for ref in (held.position, held.mark))
    age = jnp.clip(only(held.step) - mark, 0, EMPTY - 1)
    age = jnp.where(page >= 0, jnp.where(position < 0, EMPTY, age), NOT_HELD)
    number = _numbers(block, sizes)
    store_block(made.ages, row, number, age, number >= 0)
    for first in range(0, POWERS + 1, TOGETHER):
        which = first + jnp.arange(TOGETHER, dtype=jnp.int32)
        least = jnp.left_shift(jnp.int32(1), jnp.minimum(which, POWERS - 1))
        counted = jnp.where(which == USED, age[:, None] == 0, age[:, None] >= least[None])
        count = jnp.sum(counted.astype(jnp.int32), axis=0)
        store_block(made.figures, row, block * (POWERS + 1) + which, count, which >= 0)


def surveyed(asked: Asked, row: jax.Array, sizes: Sizes) -> Survey:
    """What the launch has counted of a request."""
    block = jnp.arange(pl.next_power_of_2(sizes.slot_blocks), dtype=jnp.int32)[:, None]
    which = jnp.arange(POWERS + 1, dtype=jnp.int32)[None]
    place = block * (POWERS + 1) + which
    there = jnp.broadcast_to(block < sizes.slot_blocks, place.shape)
    figures = plgpu.load(asked.figures.at[row, place], mask=there, other=0)
    return Survey(figures, jnp.sum(figures, axis=0))


def _at(figures: Int[Array, " n"], place: jax.Array | int) -> jax.Array:
    """One of some numbers in registers."""
    number = jnp.arange(figures.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(number == place, figures, 0))


def _numbers(block: jax.Array | int, sizes: Sizes) -> Int[Array, " slots"]:
    """Numbers in the page list of a block of a request's slots."""
    return block * sizes.tuning.slots + jnp.arange(sizes.tuning.slots, dtype=jnp.int32)


def _pages(
    pages_ref: jax.Ref, row: jax.Array, block: jax.Array | int, sizes: Sizes
) -> Int[Array, " slots"]:
    """Pages of a block of a request's slots, NO_SLOT for what it does not hold."""
    place = lax.div(_numbers(block, sizes), sizes.page_slots)
    return gather(pages_ref, row, place, place < sizes.max_pages)


def _slots(
    page: Int[Array, " slots"], block: jax.Array | int, sizes: Sizes
) -> Int[Array, " slots"]:
    """The slots of a block, on these pages."""
    return page * sizes.page_slots + lax.rem(_numbers(block, sizes), sizes.page_slots)


def choose(
    asked: Asked,
    made: Made,
    row: jax.Array,
    found: Survey,
    count: jax.Array,
    sizes: Sizes,
) -> None:
    """Write the slots of the `count` victims in the order of the page list."""
    offset = jnp.arange(sizes.tuning.slots, dtype=jnp.int32)
    ages = lambda block: plgpu.load(asked.ages.at[row, block * sizes.tuning.slots + offset])
    power, blocks = _power(found, count), found.blocks
    low, high, above = _least_age(_older_than(asked, row, blocks, sizes), found, power, count)
    ties = count - above

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        block, *before = state
        return (block < blocks) & (taken((before[0], before[1]), ties) < count)

    def write(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, *before = state
        age = ages(block)
        take, rank, after = ranks(age >= high, age >= low, ties, (before[0], before[1]))
        slot = _slots(_pages(asked.pages, row, block, sizes), block, sizes)
        scatter(made.victims, row, rank, slot, take)
        return block + 1, *after

    zero = jnp.int32(0)
    lax.while_loop(unfinished, write, (_first_block(found, power), zero, zero))


def _power(found: Survey, count: jax.Array) -> jax.Array:
    """The largest power of two that `count` slots are as old as.

    With 9 slots of at least 1, 9 of 2, 4 of 4 and none of 8, it is that of 2 for five victims, and
    of 4 for four.
    """
    which = jnp.arange(POWERS + 1, dtype=jnp.int32)
    return jnp.sum(((found.total >= count) & (which < POWERS)).astype(jnp.int32)) - 1


def _first_block(found: Survey, power: jax.Array) -> jax.Array:
    """The first block that holds a slot as old as that power of two."""
    blocks = found.figures.shape[0]
    block, which = (lax.broadcasted_iota(jnp.int32, found.figures.shape, axis) for axis in (0, 1))
    holds = (which == power) & (found.figures > 0)
    return jnp.min(jnp.min(jnp.where(holds, block, blocks), axis=1))


def _older_than(
    asked: Asked, row: jax.Array, blocks: jax.Array, sizes: Sizes
) -> Callable[[jax.Array], jax.Array]:
    """A function that counts the slots of at least an age; it reads more of them at once."""
    width = sizes.tuning.counted
    offset = jnp.arange(width, dtype=jnp.int32)
    written = blocks * sizes.tuning.slots

    def count(age: jax.Array) -> jax.Array:
        def add(block: jax.Array, sums: jax.Array) -> jax.Array:
            number = block * width + offset
            here = gather(asked.ages, row, number, number < written)
            return sums + (here >= age).astype(jnp.int32)

        rounds = (written + width - 1) // width
        return jnp.sum(lax.fori_loop(0, rounds, add, jnp.zeros((width,), jnp.int32)))

    return count


def _least_age(
    older_than: Callable[[jax.Array], jax.Array],
    found: Survey,
    power: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search for the age of the youngest of `count` victims, from a power of two to the next.

    In turn where it would be if slots were spread evenly over ages, which is near where they are
    unused for long, and in the middle.

    Returns:
        (low, high, above): victims are the `above` slots of age >= high, and as many as are then
        missing of those of age >= low.
    """

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, _, reached, _ = state
        return (low + 1 < high) & (reached != count)

    def cut(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above, reached, turn = state
        part = (count - above).astype(jnp.float32) / (reached - above).astype(jnp.float32)
        even = high - ((high - low).astype(jnp.float32) * part).astype(jnp.int32)
        age = jnp.where(turn % 2 == 0, even, middle(low, high))
        age = jnp.clip(age, low + 1, high - 1)
        older = older_than(age)
        enough = older >= count
        return (
            jnp.where(enough, age, low),
            jnp.where(enough, high, age),
            jnp.where(enough, above, older),
            jnp.where(enough, older, reached),
            turn + 1,
        )

    # All empty slots have the same age: what is older are none, and nothing is left to search.
    from_empty = (power == POWERS - 1).astype(jnp.int32)
    low = jnp.left_shift(jnp.int32(1), power)
    high = low + low * (1 - from_empty) + from_empty
    above = (1 - from_empty) * _at(found.total, power + 1)
    start = (low, high, above, _at(found.total, power), jnp.int32(0))
    low, high, above, *_ = lax.while_loop(unfinished, cut, start)
    return low, high, above
