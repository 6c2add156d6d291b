"""Arrays on devices out of pieces of published tensors, a block at a time.

A host never holds more of a checkpoint than a few blocks: an array that is larger is made on its
devices first, in whatever way it is sharded, and filled in place.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from dhisparse_jax.arrays import Place
from dhisparse_jax.models.params import Flat

BLOCK_BYTES = 8 * 2**20
"""Of the result; reading, dequantising and transposing a block takes a few times that."""

ReadRows = Callable[[str, slice, bool], np.ndarray]
"""Some rows of a tensor, from its name; as they are stored or, if they have scales, multiplied."""


class Piece(NamedTuple):
    """Where some rows of a tensor go in one of our arrays.

    Attributes:
        name: of the tensor, a matrix or a vector.
        at: index in our array of their first number. It may have more axes than the tensor: the
            first ones are then 1 long in the piece.
        shape: rows and columns, or how many numbers of a vector.
        first: number of the first row.
        transposed: whether ours are its columns. Published matrices are `[out, in]`.
        stored: whether the numbers of a quantised tensor are meant, without their scales.
    """

    name: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    first: int = 0
    transposed: bool = False
    stored: bool = False


Pieces = tuple[Piece, ...]
"""What an array is made of; together they cover it exactly."""


class Block(NamedTuple):
    """A box of an array: the index of its first number, and the numbers."""

    at: tuple[int, ...]
    values: np.ndarray

    @property
    def box(self) -> tuple[slice, ...]:
        """Its place as an index."""
        sides = zip(self.at, self.values.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sides)


def on_first_device(name: str, shape: tuple[int, ...]) -> Sharding:
    """Everything on one device."""
    return SingleDeviceSharding(jax.local_devices()[0])


def load_arrays(
    like: Flat,
    pieces: Mapping[str, Pieces],
    read: ReadRows,
    *,
    place: Place = on_first_device,
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, jax.Array]:
    """Every array of `like`, made of its pieces.

    Args:
        like: shape and dtype of each array by name.
        pieces: what each array is made of.
        read: reads rows of a tensor.
        place: where an array goes.
        block_bytes: how much of an array is read at a time.
    """
    arrays = {}
    for name, leaf in like.items():
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        covered = sum(math.prod(piece.shape) for piece in pieces[name])
        assert covered == math.prod(shape), name  # a table of pieces is wrong
        blocks = _blocks(pieces[name], read, shape, dtype, block_bytes)
        make = _on_host if math.prod(shape) * dtype.itemsize <= block_bytes else _on_devices
        arrays[name] = make(shape, dtype, place(name, shape), blocks)
    return arrays


def _blocks(
    pieces: Pieces, read: ReadRows, shape: tuple[int, ...], dtype: np.dtype, block_bytes: int
) -> Iterator[Block]:
    """The boxes of an array one after the other, in its dtype and with all its axes."""
    for piece in pieces:
        rows, width = piece.shape[0], math.prod(piece.shape[1:])
        axis = len(shape) - (1 if piece.transposed else len(piece.shape))
        step = max(1, block_bytes // (width * max(dtype.itemsize, 4)))
        for start in range(0, rows, step):
            first = piece.first + start
            wanted = slice(first, first + min(step, rows - start))
            values = read(piece.name, wanted, piece.stored)
            values = (values.T if piece.transposed else values).astype(dtype, copy=False)
            at = (*piece.at[:axis], piece.at[axis] + start, *piece.at[axis + 1 :])
            missing_axes = (1,) * (len(shape) - values.ndim)
            yield Block(at, values.reshape(missing_axes + values.shape))


def _on_host(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, blocks: Iterator[Block]
) -> jax.Array:
    """An array that is put together before it goes to its devices."""
    whole = np.empty(shape, dtype)
    for block in blocks:
        whole[block.box] = block.values
    # Each process puts its own parts, without asking the others.
    return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])


def _on_devices(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, blocks: Iterator[Block]
) -> jax.Array:
    """An array that is filled on its devices."""
    regions = {
        device: tuple(slice(*part.indices(size)[:2]) for part, size in zip(box, shape, strict=True))
        for device, box in sharding.addressable_devices_indices_map(shape).items()
        if box is not None
    }
    shards = {
        device: _zeros(tuple(part.stop - part.start for part in region), dtype, device)
        for device, region in regions.items()
    }
    for block in blocks:
        for device, region in regions.items():
            inside = _within(block, region)
            if inside is not None:
                values = jax.device_put(inside.values, device)
                shards[device] = _write(shards[device], values, inside.at)
                shards[device].block_until_ready()  # so that no more than one block is in flight
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()))


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """Made where it is needed: `jnp.zeros` makes it on the first device, and then copies it."""
    make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))
    return make()


@partial(jax.jit, donate_argnums=0)
def _write(
    shard: Shaped[Array, "..."], values: Shaped[Array, "..."], at: tuple[Any, ...]
) -> Shaped[Array, "..."]:
    """The shard with a box of it replaced, in place."""
    return lax.dynamic_update_slice(shard, values, at)


def _within(block: Block, region: tuple[slice, ...]) -> Block | None:
    """The part of a block that lies in a region, with its place there; None if there is none."""
    cut: list[slice] = []
    at: list[int] = []
    for box, part in zip(block.box, region, strict=True):
        start, stop = max(box.start, part.start), min(box.stop, part.stop)
        if start >= stop:
            return None
        cut.append(slice(start - box.start, stop - box.start))
        at.append(start - part.start)
    return Block(tuple(at), block.values[tuple(cut)])
