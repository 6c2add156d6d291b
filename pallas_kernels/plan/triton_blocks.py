"""What both kernels of the plan share: sizes, operands, launches, and masked access by block."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT, masked

Word = Any
"""An array outside a kernel, a reference to it inside, a shape for what a launch makes."""


Pair = tuple[jax.Array, jax.Array]
"""Two numbers or two blocks that go together, such as what a loop carries."""


class Tuning(NamedTuple):
    """Sizes of the programs; blocks are powers of two of at most 2**14, which `ranks` can count.

    Attributes:
        look_block: places of a selection in a block of the look-up. One per thread is best: then
            no operand moves between threads.
        look_unroll: blocks that a program looks up together.
        look_warps: its warps.
        look_programs: how many programs look up, about, if there is work for so many.
        survey_programs: how many survey slots, likewise.
        block: places that the program of a request settles together.
        slots: slots that it looks at together, and that are surveyed together.
        moves: misses to which it gives a slot together.
        warps: its warps.
    """

    look_block: int = 512
    look_unroll: int = 4
    look_warps: int = 16
    look_programs: int = 256
    survey_programs: int = 512
    block: int = 4096
    slots: int = 2048
    moves: int = 2048
    warps: int = 16


class Sizes(NamedTuple):
    """Static sizes: U places of a selection, Q retiring positions, and how they are handled."""

    requests: int
    places: int
    retiring: int
    staging: int
    capacity: int
    page_slots: int
    max_pages: int
    tuning: Tuning
    interpret: bool

    @property
    def entries(self) -> int:
        """Entries of the flat map."""
        return self.requests * self.capacity

    @property
    def look_block(self) -> int:
        """Places in a block of the look-up."""
        return min(self.tuning.look_block, pl.next_power_of_2(self.places))

    @property
    def look_rounds(self) -> int:
        """How often a program of the look-up takes some blocks."""
        rounds = pl.cdiv(self.places, self.look_block * self.tuning.look_unroll)
        return pl.cdiv(rounds, max(1, self.tuning.look_programs // self.requests))

    @property
    def look_parts(self) -> int:
        """Programs that look up for a request."""
        together = self.look_block * self.tuning.look_unroll
        return pl.cdiv(self.places, self.look_rounds * together)

    @property
    def block(self) -> int:
        """Places that the program of a request settles together."""
        return min(self.tuning.block, pl.next_power_of_2(self.places))

    @property
    def blocks(self) -> int:
        """Blocks of a selection."""
        return pl.cdiv(self.places, self.block)

    @property
    def slot_blocks(self) -> int:
        """Blocks of the slots that a request can hold."""
        return pl.cdiv(self.max_pages * self.page_slots, self.tuning.slots)

    @property
    def survey_parts(self) -> int:
        """Programs that survey the slots of a request, every one in turn a block."""
        return min(self.slot_blocks, max(1, self.tuning.survey_programs // self.requests))


class Lookup(NamedTuple):
    """What the look-up reads."""

    selection: Word  # [R, U]
    start: Word  # [R]; of the tail, as what follows
    first: Word  # [R]
    length: Word  # [1]
    slot_of: Word  # [R, C]
    step: Word  # [1]


class Touched(NamedTuple):
    """What the look-up updates in place."""

    mark: Word  # [slots]


class Begun(NamedTuple):
    """What the look-up makes: columns of the result that are still to be completed, and claims."""

    location: Word  # [R, U]
    fetch_position: Word  # [R, U]
    fetch_slot: Word  # [R, U]
    fetch_evicted: Word  # [R, U]
    claim: Word  # [R, U]; see `claim`


class Held(NamedTuple):
    """What surveying reads."""

    pages: Word  # [R, Pmax]
    position: Word  # [slots]
    mark: Word  # [slots]
    step: Word  # [1]


class Surveyed(NamedTuple):
    """What surveying makes."""

    ages: Word  # [R, slot_blocks * slots]
    figures: Word  # [R, slot_blocks * figures]
    oldest: Word  # [R, slot_blocks]


class Asked(NamedTuple):
    """What settling reads."""

    claim: Word  # [R, U]
    retiring: Word  # [R, Q]
    staging: Word  # [R, G]; None if G is 0
    pages: Word  # [R, Pmax]
    step: Word  # [1]
    ages: Word  # of `Surveyed`
    figures: Word  # likewise
    oldest: Word  # likewise


class Kept(NamedTuple):
    """What settling updates in place: what was begun, and the tables."""

    location: Word  # [R, U]
    fetch_position: Word  # [R, U]
    fetch_slot: Word  # [R, U]
    fetch_evicted: Word  # [R, U]
    slot_of: Word  # [R, C]
    position: Word  # [slots]
    mark: Word  # [slots]


class Made(NamedTuple):
    """What settling makes: columns of the result, and scratch."""

    retire_position: Word  # [R, Q]
    retire_slot: Word  # [R, Q]
    retire_evicted: Word  # [R, Q]
    held: Word  # [R]
    selected: Word  # [R]
    hit: Word  # [R]
    tail: Word  # [R]
    fetched: Word  # [R]
    staged: Word  # [R]
    firsts: Word  # [R, 2 U]; positions to fetch in order, and from U on those in the tail
    victims: Word  # [R, U + Q]


Reads = TypeVar("Reads")
Updates = TypeVar("Updates")
Makes = TypeVar("Makes")


def launch(
    kernel: Callable[..., None],
    sizes: Sizes,
    reads: Reads,
    updates: Updates,
    makes: Makes,
    *,
    blocks: int = 1,
    warps: int,
) -> tuple[Updates, Makes]:
    """Run `kernel` on blocks of every request.

    Every operand is int32 and addressed as a whole. The kernel gets what it reads, what it updates
    twice (only the second is to be used), and what it makes, in the tuples in which they came.

    Args:
        kernel: takes `sizes`, too.
        sizes: how many requests there are, among others.
        reads: arrays.
        updates: arrays that are updated in place.
        makes: shapes.
        blocks: programs per request.
        warps: warps of a program.

    Returns:
        `updates` and `makes` after the launch.
    """
    shape = lambda given: jax.ShapeDtypeStruct(given, jnp.int32)
    shapes = (
        jax.tree.map(lambda array: shape(array.shape), updates),
        jax.tree.map(shape, makes, is_leaf=lambda given: type(given) is tuple),
    )
    whole = functools.partial(jax.tree.map, lambda _: pl.BlockSpec(memory_space=pl.ANY))
    first, count = len(jax.tree.leaves(reads)), len(jax.tree.leaves(updates))
    call = pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid=(sizes.requests, blocks),
        in_specs=whole((reads, updates)),
        out_specs=whole(shapes),
        out_shape=shapes,
        input_output_aliases={first + number: number for number in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=sizes.interpret,
        name=f"plan_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )
    return call(reads, updates)


def barrier(sizes: Sizes) -> None:
    """All threads of this program have read what they read before, and see what any has written."""
    if not sizes.interpret:
        plgpu.debug_barrier()


def gather(
    ref: jax.Ref, row: jax.Array, ids: jax.Array, live: jax.Array, *, keep: bool = True
) -> jax.Array:
    """`ref[row, ids]` where live, else NO_SLOT; not kept in L1 if nobody reads it again."""
    evict = None if keep else "evict_first"
    return plgpu.load(ref.at[row, ids], mask=live, other=NO_SLOT, eviction_policy=evict)


def gather_slots(ref: jax.Ref, slots: jax.Array, live: jax.Array) -> jax.Array:
    """`ref[slots]` where live, else NO_SLOT."""
    return plgpu.load(ref.at[slots], mask=live, other=NO_SLOT)


def gather_positions(
    ref: jax.Ref, row: jax.Array, place: jax.Array, sizes: Sizes
) -> Int[Array, " n"]:
    """Positions at these places of a row, as far as it goes; NO_SLOT for what is none."""
    position = gather(ref, row, place, place < ref.shape[1])
    return jnp.where(position < sizes.capacity, position, NO_SLOT)


def store_block(
    ref: jax.Ref, row: jax.Array, place: jax.Array, values: jax.Array | int, live: jax.Array
) -> None:
    """`ref[row, place] = values` where live, for places that are all distinct."""
    values = jnp.broadcast_to(jnp.asarray(values, jnp.int32), place.shape)
    plgpu.store(ref.at[row, place], values, mask=live)


def scatter(
    ref: jax.Ref, row: jax.Array, ids: jax.Array, values: jax.Array | int, live: jax.Array
) -> None:
    """`ref[row, ids] = values` where live.

    What is not live goes past the end: interpret mode has no masks, but drops such an index.
    """
    store_block(ref, row, jnp.where(live, ids, ref.shape[1]), values, live)


def scatter_slots(ref: jax.Ref, slots: jax.Array, values: jax.Array, live: jax.Array) -> None:
    """`ref[slots] = values` where live."""
    slots = jnp.where(live, slots, ref.shape[0])
    plgpu.store(ref.at[slots], jnp.broadcast_to(values, slots.shape), mask=live)


def only(ref: jax.Ref) -> Int[Array, " 1"]:
    """All of an array of one; interpret mode knows no constant as an index."""
    return plgpu.load(ref.at[jnp.arange(1, dtype=jnp.int32)])


def put(
    kept: Kept,
    row: jax.Array,
    content: tuple[jax.Array, jax.Array, jax.Array],
    step: jax.Array,
    sizes: Sizes,
) -> jax.Array:
    """Put positions into slots where live: forget what the slots held, record what they hold.

    Returns:
        What they held.
    """
    position, slot, live = content
    old = gather_slots(kept.position, slot, live)
    barrier(sizes)
    scatter(kept.slot_of, row, old, NO_SLOT, old >= 0)
    scatter(kept.slot_of, row, position, slot, live)
    scatter_slots(kept.position, slot, position, live)
    scatter_slots(kept.mark, slot, step, live)
    return old


def claim(
    row: jax.Array, position: jax.Array, hot: jax.Array, tail: jax.Array, sizes: Sizes
) -> jax.Array:
    """What a place claims in the flat map: an entry; counted from the end if it is in the tail.

    The end itself, which is no entry, for what is hot and for what is no position.
    """
    entry = row * sizes.capacity + position
    entry = jnp.where(tail, entry - sizes.entries, entry)
    return jnp.where((position < 0) | hot, sizes.entries, entry)


def claimed(
    claim: Int[Array, " n"], row: jax.Array, sizes: Sizes
) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Positions that places claim, else NO_SLOT; and which of them are misses."""
    tail, miss = claim < 0, (claim >= 0) & (claim < sizes.entries)
    position = claim - row * sizes.capacity
    position = jnp.where(tail, position + sizes.entries, position)
    return masked(position, tail | miss), miss


def place_code(place: jax.Array, places: int) -> jax.Array:
    """What a place leaves in the map to claim its position: -U - 1 for the first to -2."""
    return place - places - 1


def rank_code(rank: jax.Array, places: int) -> jax.Array:
    """What stands in the map for miss number `rank` until it has a slot: below every place's code.

    It is its own inverse.
    """
    return -places - 2 - rank
