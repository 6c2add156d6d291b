"""The slots that may be overwritten, the longest unused first: a part of the program of a request.

Ages are gathered once (pages, then two words per slot), and read again from L1, many at once, each
time that their range is cut: at most twice as often as the range has bits, a few times in practice,
and never while there are enough empty slots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common.triton_select import middle, ranks, taken
from pallas_kernels.plan.triton_blocks import (
    Asked,
    Kept,
    Made,
    Sizes,
    gather,
    gather_slots,
    only,
    scatter,
    store_block,
)

EMPTY = 2**30
"""Age of an empty slot: older than any other."""

NOT_HELD = -1
"""Age of what is no slot of the request. A slot of the working set has age 0."""


class Survey(NamedTuple):
    """The slots of a request, by numbers. All are scalars.

    Attributes:
        blocks: how many blocks of slots there are.
        used: slots of the working set.
        free: the others.
        empty: those of the free that hold nothing.
        oldest: largest age of those that hold something.
    """

    blocks: jax.Array
    used: jax.Array
    free: jax.Array
    empty: jax.Array
    oldest: jax.Array


def survey(
    asked: Asked,
    kept: Kept,
    made: Made,
    row: jax.Array,
    sizes: Sizes,
) -> Survey:
    """Write the age of every slot, in the order of the page list, and count them."""
    blocks = _held_blocks(asked.pages, row, sizes)
    zeros = jnp.zeros((sizes.tuning.slots,), jnp.int32)

    def read(block: jax.Array | int, page: jax.Array) -> tuple[jax.Array, ...]:
        slot = _slots(page, block, sizes)
        return page, *(gather_slots(ref, slot, page >= 0) for ref in (kept.position, kept.mark))

    def look(block: jax.Array, carried: Any) -> Any:  # noqa: ANN401
        (page, position, mark), after, seen = carried
        # What the next block of slots holds is under way meanwhile, and the pages after it.
        ahead = _pages(asked.pages, row, block + 2, sizes), read(block + 1, after)
        age = jnp.clip(only(asked.step) - mark, 0, EMPTY - 1)
        age = jnp.where(page >= 0, jnp.where(position < 0, EMPTY, age), NOT_HELD)
        number = _numbers(block, sizes)
        store_block(made.ages, row, number, age, number >= 0)
        which = age == 0, age > 0, age == EMPTY
        counts = (old + new.astype(jnp.int32) for old, new in zip(seen[:3], which, strict=True))
        seen = (*counts, jnp.maximum(seen[3], jnp.where(age == EMPTY, 0, age)))
        return ahead[1], ahead[0], seen

    page, after = (_pages(asked.pages, row, block, sizes) for block in (0, 1))
    start = read(0, page), after, (zeros, zeros, zeros, zeros)
    *counts, oldest = lax.fori_loop(0, blocks, look, start)[2]
    used, free, empty = (jnp.sum(count) for count in counts)
    return Survey(blocks, used, free, empty, jnp.max(oldest))


def _held_blocks(pages_ref: jax.Ref, row: jax.Array, sizes: Sizes) -> Int[Array, ""]:
    """How many blocks of slots the request has: those whose first page it holds."""
    block = jnp.arange(pl.next_power_of_2(sizes.slot_blocks), dtype=jnp.int32)
    first = block * sizes.tuning.slots // sizes.page_slots
    page = gather(pages_ref, row, first, block < sizes.slot_blocks)
    return jnp.sum((page >= 0).astype(jnp.int32))


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
    ages = lambda block: plgpu.load(made.ages.at[row, block * sizes.tuning.slots + offset])
    low, high, above = _least_age(_older_than(made, row, found, sizes), found, count)
    ties = count - above

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        block, *before = state
        return (block < found.blocks) & (taken((before[0], before[1]), ties) < count)

    def write(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, *before = state
        age = ages(block)
        take, rank, after = ranks(age >= high, age >= low, ties, (before[0], before[1]))
        slot = _slots(_pages(asked.pages, row, block, sizes), block, sizes)
        scatter(made.victims, row, rank, slot, take)
        return block + 1, *after

    zero = jnp.int32(0)
    lax.while_loop(unfinished, write, (zero, zero, zero))


def _older_than(
    made: Made, row: jax.Array, found: Survey, sizes: Sizes
) -> Callable[[jax.Array], jax.Array]:
    """A function that counts the slots of at least an age; it reads more of them at once."""
    width = sizes.tuning.counted
    offset = jnp.arange(width, dtype=jnp.int32)
    written = found.blocks * sizes.tuning.slots

    def count(age: jax.Array) -> jax.Array:
        def add(block: jax.Array, sums: jax.Array) -> jax.Array:
            number = block * width + offset
            here = gather(made.ages, row, number, number < written)
            return sums + (here >= age).astype(jnp.int32)

        rounds = (written + width - 1) // width
        return jnp.sum(lax.fori_loop(0, rounds, add, jnp.zeros((width,), jnp.int32)))

    return count


def _least_age(
    older_than: Callable[[jax.Array], jax.Array], found: Survey, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search for the age of the youngest of `count` victims.

    In turn where it would be if slots were spread evenly over ages, which is near where they are
    unused for long, and in the middle.

    Returns:
        (low, high, above): victims are the `above` slots of age >= high, and as many as are then
        missing of those of age >= low.
    """
    from_empty = found.empty >= count

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

    start = (
        # A choice between two constants: the Triton lowering of `where` types it as a boolean.
        1 + (EMPTY - 1) * from_empty.astype(jnp.int32),
        jnp.where(from_empty, EMPTY + 1, found.oldest + 1),
        jnp.where(from_empty, 0, found.empty),
        jnp.where(from_empty, found.empty, found.free),
        jnp.int32(0),
    )
    low, high, above, *_ = lax.while_loop(unfinished, cut, start)
    return low, high, above
