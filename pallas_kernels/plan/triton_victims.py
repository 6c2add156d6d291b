"""Stage 3 of the plan on a GPU: the slots that may be overwritten, the longest unused first."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT
from pallas_kernels.common.triton_select import middle, ranks
from pallas_kernels.plan.triton_blocks import (
    EMPTY,
    First,
    Found,
    Launch,
    Sizes,
    gather,
    scatter,
    store_block,
)
from pallas_kernels.plan.types import PlanInput


def held_slots(
    pages_ref: jax.Ref, row: jax.Array, block: jax.Array, sizes: Sizes
) -> tuple[Int[Array, " slots"], Int[Array, " slots"], Bool[Array, " slots"]]:
    """Numbers in the page list, slots, and which are held, of a block of a request's slots."""
    number = block * sizes.tuning.slots + jnp.arange(sizes.tuning.slots, dtype=jnp.int32)
    place = lax.div(number, sizes.page_slots)
    page = gather(pages_ref, row, place, place < sizes.max_pages)
    return number, page * sizes.page_slots + lax.rem(number, sizes.page_slots), page >= 0


# 3. Victims


def victims_of(
    launch: Launch,
    sizes: Sizes,
    first: First,
    ages: Int[Array, "R slots"],
    wanted: PlanInput,
    slot_of: Int[Array, "R C"],
) -> tuple[Int[Array, "R n"], Int[Array, "R Q"], Found]:
    """The victims of each request by page list, and which of them each retiring position gets."""
    count = (sizes.requests,)
    most = (sizes.requests, sizes.places + sizes.retiring)
    victims, retire_rank, *found = launch(
        _victims_kernel,
        (*first, ages, wanted.pages, wanted.retiring, slot_of),
        (most, wanted.retiring.shape, count, count, count, count),
    )
    return victims, retire_rank, Found(*found)


def _victims_kernel(
    missing_ref: jax.Ref,  # [R, blocks]
    tail_ref: jax.Ref,  # [R, blocks]
    ages_ref: jax.Ref,  # [R, slot_blocks * slots]
    pages_ref: jax.Ref,  # [R, Pmax]
    retiring_ref: jax.Ref,  # [R, Q]
    slot_of_ref: jax.Ref,  # [R, C]
    victims_ref: jax.Ref,  # [R, U + Q]
    retire_rank_ref: jax.Ref,  # [R, Q]
    hit_ref: jax.Ref,  # [R]
    found_tail_ref: jax.Ref,  # [R]
    fetched_ref: jax.Ref,  # [R]
    count_ref: jax.Ref,  # [R]
    *,
    sizes: Sizes,
) -> None:
    row = pl.program_id(0)
    block = jnp.arange(pl.next_power_of_2(sizes.blocks), dtype=jnp.int32)
    total = lambda ref: jnp.sum(jnp.maximum(gather(ref, row, block, block < sizes.blocks), 0))
    missing = total(missing_ref)
    place = jnp.arange(pl.next_power_of_2(sizes.retiring), dtype=jnp.int32)
    retiring = gather(retiring_ref, row, place, place < sizes.retiring)
    retire = (retiring >= 0) & (gather(slot_of_ref, row, retiring, retiring >= 0) < 0)
    needed = missing + jnp.sum(retire.astype(jnp.int32))
    blocks = held_blocks(pages_ref, row, sizes)
    ages = functools.partial(ages_of, ages_ref, row, sizes)
    hits, low, high, above, needed = least_age(ages, sizes.tuning.slots, blocks, needed)
    limits = (low, high, needed - above)
    write_victims(ages, (pages_ref, victims_ref), row, limits, blocks, sizes)
    rank = missing + jnp.cumsum(retire.astype(jnp.int32), dtype=jnp.int32) - 1
    rank = jnp.where(retire & (rank < needed), rank, NO_SLOT)
    store_block(retire_rank_ref, row, place, rank, place < sizes.retiring)
    plgpu.store(hit_ref.at[row], hits)
    plgpu.store(found_tail_ref.at[row], total(tail_ref))
    plgpu.store(fetched_ref.at[row], missing)
    plgpu.store(count_ref.at[row], needed)


def held_blocks(pages_ref: jax.Ref, row: jax.Array, sizes: Sizes) -> Int[Array, ""]:
    """How many blocks of slots the request has: those whose first page it holds."""
    block = jnp.arange(pl.next_power_of_2(sizes.slot_blocks), dtype=jnp.int32)
    page = gather(
        pages_ref, row, block * sizes.tuning.slots // sizes.page_slots, block < sizes.slot_blocks
    )
    return jnp.sum((page >= 0).astype(jnp.int32))


def ages_of(
    ages_ref: jax.Ref, row: jax.Array, sizes: Sizes, block: jax.Array
) -> Int[Array, " slots"]:
    """Ages of a block of the slots that the request can hold."""
    number = block * sizes.tuning.slots + jnp.arange(sizes.tuning.slots, dtype=jnp.int32)
    return plgpu.load(ages_ref.at[row, number])


def least_age(
    ages: Callable[[jax.Array], jax.Array], slots: int, blocks: jax.Array, needed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Bisect for the age of the youngest victim.

    Returns:
        Slots of the working set; (low, high, above): victims are the `above` slots of age >= high,
        and as many as are then missing of those of age >= low; how many victims there are.
    """
    zeros = jnp.zeros((slots,), jnp.int32)

    def look(block: jax.Array, seen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        age = ages(block)
        which = age == 0, age > 0, age == EMPTY
        counts = (a + b.astype(jnp.int32) for a, b in zip(seen[:3], which, strict=True))
        return (*counts, jnp.maximum(seen[3], jnp.where(age == EMPTY, 0, age)))

    *counts, oldest = lax.fori_loop(0, blocks, look, (zeros, zeros, zeros, zeros))
    hits, free, empty = (jnp.sum(count) for count in counts)
    oldest = jnp.max(oldest)
    needed = jnp.minimum(needed, free)
    from_empty = empty >= needed

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, _, reached = state
        return (low + 1 < high) & (reached != needed)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above, reached = state
        age = middle(low, high)
        add = lambda block, count: count + (ages(block) >= age).astype(jnp.int32)
        count = jnp.sum(lax.fori_loop(0, blocks, add, zeros))
        enough = count >= needed
        return (
            jnp.where(enough, age, low),
            jnp.where(enough, high, age),
            jnp.where(enough, above, count),
            jnp.where(enough, count, reached),
        )

    start = (
        # A choice between two constants: the Triton lowering of `where` types it as a boolean.
        1 + (EMPTY - 1) * from_empty.astype(jnp.int32),
        jnp.where(from_empty, EMPTY + 1, oldest + 1),
        jnp.where(from_empty, 0, empty),
        jnp.where(from_empty, empty, free),
    )
    low, high, above, _ = lax.while_loop(unfinished, halve, start)
    return hits, low, high, above, needed


def write_victims(
    ages: Callable[[jax.Array], jax.Array],
    refs: tuple[jax.Ref, jax.Ref],
    row: jax.Array,
    limits: tuple[jax.Array, jax.Array, jax.Array],
    blocks: jax.Array,
    sizes: Sizes,
) -> None:
    """Slots of the victims in the order of the page list."""
    pages_ref, victims_ref = refs
    low, high, ties = limits

    def write(block: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        age = ages(block)
        take, rank, after = ranks(age >= high, age >= low, ties, before)
        _, slot, _ = held_slots(pages_ref, row, block, sizes)
        scatter(victims_ref, row, rank, slot, take)
        return after

    zero = jnp.int32(0)
    lax.fori_loop(0, blocks, write, (zero, zero))


# 4. Fill
