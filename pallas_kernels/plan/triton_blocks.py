"""What the kernels of the plan share: sizes, launches, and masked access by block."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import NO_SLOT

EMPTY = 2**30
"""Age of an empty slot: older than any other."""

NOT_HELD = -1
"""Age of what is no slot of the request. A slot of the working set has age 0."""

ANY = pl.BlockSpec(memory_space=pl.ANY)


class Tuning(NamedTuple):
    """Sizes of the programs.

    Attributes:
        block: places of a selection that a program handles.
        warps: its warps.
        slots: slots whose ages are looked at together.
        victim_warps: warps of the program that chooses the victims of a request.
    """

    block: int = 1024
    warps: int = 4
    slots: int = 2048
    victim_warps: int = 16


class Sizes(NamedTuple):
    """Static sizes: U places of a selection, Q retiring positions, and the blocks of both."""

    requests: int
    places: int
    retiring: int
    staging: int
    capacity: int
    page_slots: int
    max_pages: int
    paged: int
    tuning: Tuning

    @property
    def blocks(self) -> int:
        """Blocks of a selection."""
        return pl.cdiv(self.places, self.tuning.block)

    @property
    def slot_blocks(self) -> int:
        """Blocks of the slots that a request can hold."""
        return pl.cdiv(self.max_pages * self.page_slots, self.tuning.slots)


class Found(NamedTuple):
    """What `victims` counts per request; the last is how many victims there are."""

    hit: Int[Array, " R"]
    tail: Int[Array, " R"]
    fetched: Int[Array, " R"]
    victims: Int[Array, " R"]


class First(NamedTuple):
    """First places of missing and of tail positions, per block of the selection."""

    missing: Int[Array, "R blocks"]
    tail: Int[Array, "R blocks"]


Launch = Callable[..., tuple[jax.Array, ...]]
"""`launch_kernel` with its first two arguments."""


def launch_kernel(
    sizes: Sizes,
    interpret: bool,
    kernel: Callable[..., None],
    operands: tuple[jax.Array, ...],
    outputs: tuple[tuple[int, ...], ...],
    *,
    blocks: int = 0,
    in_place: dict[int, int] | None = None,
    **options: int,
) -> tuple[jax.Array, ...]:
    """Run `kernel` on every request and block; all arrays are int32 and addressed as a whole.

    Without `blocks` a request is one program. `in_place` leads from operands to outputs.
    """
    alone = blocks == 0
    tuning = sizes.tuning
    call = pl.pallas_call(
        functools.partial(kernel, sizes=sizes, **options),
        grid=(sizes.requests,) if alone else (sizes.requests, blocks),
        in_specs=[ANY] * len(operands),
        out_specs=(ANY,) * len(outputs),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outputs),
        input_output_aliases=in_place or {},
        compiler_params=plgpu.CompilerParams(
            num_warps=tuning.victim_warps if alone else tuning.warps, num_stages=1
        ),
        interpret=interpret,
        name=f"plan_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )
    return tuple(call(*operands))


class Block(NamedTuple):
    """What a program handles: places of the selection of one request.

    Asked for once, at the top of a kernel: interpret mode knows no program ids inside conditions.
    """

    row: jax.Array
    number: jax.Array
    place: Int[Array, " block"]
    inside: Bool[Array, " block"]


def block_of(sizes: Sizes) -> Block:
    """The places of the selection that this program handles."""
    number = pl.program_id(1)
    place = number * sizes.tuning.block + jnp.arange(sizes.tuning.block, dtype=jnp.int32)
    return Block(pl.program_id(0), number, place, place < sizes.places)


def gather(ref: jax.Ref, row: jax.Array, ids: jax.Array, live: jax.Array) -> jax.Array:
    """`ref[row, ids]` where live, else NO_SLOT."""
    return plgpu.load(ref.at[row, ids], mask=live, other=NO_SLOT)


def gather_slots(ref: jax.Ref, slots: jax.Array, live: jax.Array) -> jax.Array:
    """`ref[slots]` where live, else NO_SLOT."""
    return plgpu.load(ref.at[slots], mask=live, other=NO_SLOT)


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


def place_code(place: jax.Array | int, places: int) -> jax.Array | int:
    """What a place leaves in the map to claim its position: -U - 1 for the first to -2."""
    return place - places - 1


def staged_code(number: jax.Array, places: int) -> jax.Array:
    """What stands in the map for staging slot `number` until it is forgotten: below every code."""
    return -places - 2 - number
