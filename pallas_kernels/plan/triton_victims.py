"""The slots that may be overwritten, the longest unused first.

A launch of its own gathers the age of every slot (pages, then two words per slot), a program for
some blocks of a request's slots. It notes the oldest of each block, and counts those of at least
each power of two. So the program of the request knows within a factor of two how old its victims
are, how many slots are empty, and of every age which blocks hold a slot as old, before it reads an
age. It reads ages of blocks that matter only: once each time that their range is cut to a ninth,
which is twice with ages up to some hundreds and never while there are enough empty slots, and once
where there are victims.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.triton_select import ranks
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
"""Ages for which slots are counted at the same time."""


class Survey(NamedTuple):
    """The slots of a request, by numbers.

    Attributes:
        oldest: age of the oldest slot, by block; NOT_HELD where there is none.
        total: slots of at least each power of two, and those of the working set, of all blocks.
    """

    oldest: Int[Array, " blocks"]
    total: Int[Array, " figures"]

    @property
    def end(self) -> int:
        """Stands for no block."""
        return self.oldest.shape[0]

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
    """Ages of all slots, in the order of the page lists, and figures of the blocks with any."""
    blocks = sizes.slot_blocks
    _, made = launch(
        _survey_kernel,
        sizes,
        Held(pages=pages, position=kept.position, mark=kept.mark, step=step),
        (),
        Surveyed(
            ages=(sizes.requests, blocks * sizes.tuning.slots),
            figures=(sizes.requests, blocks * (POWERS + 1)),
            oldest=(sizes.requests, blocks),
        ),
        blocks=sizes.survey_parts,
        warps=sizes.tuning.warps,
    )
    return made


def _survey_kernel(
    held: Held, _: tuple[()], __: tuple[()], made: Surveyed, *, sizes: Sizes
) -> None:
    row, part = pl.program_id(0), pl.program_id(1)
    step, parts = only(held.step), sizes.survey_parts
    rounds = jnp.arange(pl.next_power_of_2(pl.cdiv(sizes.slot_blocks, parts)), dtype=jnp.int32)
    count = jnp.sum(_listed(held.pages, row, part + rounds * parts, sizes).astype(jnp.int32))

    def look(turn: jax.Array, _: None) -> None:
        block = part + turn * parts
        age = _gather_ages(held, row, block, step, sizes)
        number = _numbers(block, sizes)
        store_block(made.ages, row, number, age, number >= 0)
        plgpu.store(made.oldest.at[row, block], jnp.max(age))
        for first in range(0, POWERS + 1, TOGETHER):
            which = first + jnp.arange(TOGETHER, dtype=jnp.int32)
            least = jnp.left_shift(jnp.int32(1), jnp.minimum(which, POWERS - 1))
            counted = jnp.where(which == USED, age[:, None] == 0, age[:, None] >= least[None])
            figures = jnp.sum(counted.astype(jnp.int32), axis=0)
            store_block(made.figures, row, block * (POWERS + 1) + which, figures, which >= 0)

    lax.fori_loop(0, count, look, None)


def _gather_ages(
    held: Held, row: jax.Array, block: jax.Array, step: jax.Array, sizes: Sizes
) -> Int[Array, " slots"]:
    """Ages of a block of a request's slots."""
    page = _pages(held.pages, row, block, sizes)
    slot = _slots(page, block, sizes)
    position, mark = (gather_slots(ref, slot, page >= 0) for ref in (held.position, held.mark))
    age = jnp.clip(step - mark, 0, EMPTY - 1)
    return jnp.where(page >= 0, jnp.where(position < 0, EMPTY, age), NOT_HELD)


def surveyed(asked: Asked, row: jax.Array, sizes: Sizes) -> Survey:
    """What the launch has noted of a request; of blocks without a slot it has noted nothing."""
    block = jnp.arange(pl.next_power_of_2(sizes.slot_blocks), dtype=jnp.int32)
    listed = _listed(asked.pages, row, block, sizes)
    which = jnp.arange(POWERS + 1, dtype=jnp.int32)[None]
    place = block[:, None] * (POWERS + 1) + which
    there = jnp.broadcast_to(block[:, None] < sizes.slot_blocks, place.shape)
    figures = plgpu.load(asked.figures.at[row, place], mask=there, other=0)
    oldest = gather(asked.oldest, row, block, block < sizes.slot_blocks)
    total = jnp.sum(jnp.where(listed[:, None], figures, 0), axis=0)
    return Survey(jnp.where(listed, oldest, NOT_HELD), total)


def _listed(
    pages_ref: jax.Ref, row: jax.Array, block: Int[Array, " n"], sizes: Sizes
) -> Bool[Array, " n"]:
    """Which blocks a request has slots in: the first ones, since its pages are listed."""
    place = lax.div(block * sizes.tuning.slots, sizes.page_slots)
    return gather(pages_ref, row, place, place < sizes.max_pages) >= 0


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
    low, high, above = _least_age(asked, row, found, count, sizes)
    ties = count - above

    def following(block: jax.Array | int, tied: jax.Array | int) -> jax.Array:
        return _next_block(found, block, jnp.where(tied < ties, low, high))

    def write(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, *before = state
        age = _ages(asked, row, block, sizes)
        slot = _slots(_pages(asked.pages, row, block, sizes), block, sizes)
        take, rank, after = ranks(age >= high, age >= low, ties, (before[0], before[1]))
        scatter(made.victims, row, rank, slot, take)
        return following(block + 1, after[1]), *after

    zero = jnp.int32(0)
    start = following(0, 0), zero, zero
    lax.while_loop(lambda state: state[0] < found.end, write, start)


def _power(found: Survey, count: jax.Array) -> jax.Array:
    """The largest power of two that `count` slots are as old as.

    With 9 slots of at least 1, 9 of 2, 4 of 4 and none of 8, it is that of 2 for five victims, and
    of 4 for four.
    """
    which = jnp.arange(POWERS + 1, dtype=jnp.int32)
    return jnp.sum(((found.total >= count) & (which < POWERS)).astype(jnp.int32)) - 1


def _next_block(found: Survey, block: jax.Array | int, age: jax.Array) -> jax.Array:
    """The first block from `block` on that holds a slot of at least this age."""
    number = jnp.arange(found.end, dtype=jnp.int32)
    holds = (number >= block) & (found.oldest >= age)
    return jnp.min(jnp.where(holds, number, found.end))


def _ages(asked: Asked, row: jax.Array, block: jax.Array, sizes: Sizes) -> Int[Array, " slots"]:
    """Ages of a block, NOT_HELD for no block."""
    number = _numbers(block, sizes)
    return gather(asked.ages, row, number, number < sizes.slot_blocks * sizes.tuning.slots)


def _older(
    asked: Asked, row: jax.Array, found: Survey, ages: Int[Array, " n"], sizes: Sizes
) -> Int[Array, " n"]:
    """Count the slots of at least each of these ages.

    The ages of the next block are under way while one is counted.
    """
    following = lambda block: _next_block(found, block, jnp.min(ages))

    def add(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        _, here, after, sums = state
        there = _ages(asked, row, after, sizes)
        sums += (here[:, None] >= ages[None]).astype(jnp.int32)
        return after, there, following(after + 1), sums

    first = following(0)
    sums = jnp.zeros((sizes.tuning.slots, ages.shape[0]), jnp.int32)
    start = first, _ages(asked, row, first, sizes), following(first + 1), sums
    return jnp.sum(lax.while_loop(lambda state: state[0] < found.end, add, start)[3], axis=0)


def _least_age(
    asked: Asked, row: jax.Array, found: Survey, count: jax.Array, sizes: Sizes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search for the age of the youngest of `count` victims, from a power of two to the next.

    Returns:
        (low, high, above): victims are the `above` slots of age >= high, and as many as are then
        missing of those of age >= low.
    """

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, _, reached = state
        return (low + 1 < high) & (reached != count)

    def cut(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above, reached = state
        part = (high - low + TOGETHER) // (TOGETHER + 1)
        age = low + part * (1 + jnp.arange(TOGETHER, dtype=jnp.int32))
        age = jnp.minimum(age, high - 1)
        older = _older(asked, row, found, age, sizes)
        enough = older >= count
        return (
            jnp.max(jnp.where(enough, age, low)),
            jnp.min(jnp.where(enough, high, age)),
            jnp.max(jnp.where(enough, above, older)),
            jnp.min(jnp.where(enough, older, reached)),
        )

    power = _power(found, count)
    low = jnp.left_shift(jnp.int32(1), power)
    # None is older than the oldest: nothing is left to search among empty slots.
    high = low + jnp.clip(jnp.max(found.oldest) + 1 - low, 1, low)
    above = jnp.where(power == POWERS - 1, 0, _at(found.total, power + 1))
    low, high, above, _ = lax.while_loop(
        unfinished, cut, (low, high, above, _at(found.total, power))
    )
    return low, high, above
