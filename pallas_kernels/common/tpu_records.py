"""Moving whole records by index in a TPU kernel: what `retrieve` and `backup` share.

A record is whole tiles in a row of tiles (`record_layout.lanes_view`), so a copy is one DMA of one
contiguous run, between device memory and the host or within device memory. Nothing passes through
VMEM, to which libtpu implements no DMA from the host (2026-11).

The link is limited by reads per second, and each waits long: many copies are in flight. They share
a semaphore, which counts bytes: to wait for one record is to wait until one more has arrived,
whichever it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.ids import INT32_MAX, NO_SLOT, POISON, in_range
from pallas_kernels.common.interpret import tpu_interpret
from pallas_kernels.common.record_layout import LINES, TILES, words_of_record

IN_FLIGHT = 64
"""Copies in flight. By Little's law 64 of 4 KB keep 32 GB/s busy over a latency of 8 us."""

CHUNK = 512
"""Entries of a list that are in scalar memory at a time, twice."""


def supports(*pools: Int[Array, "_ *_"]) -> str | None:
    """Why the kernels cannot take these pools; None if they can."""
    for pool in pools:
        words = words_of_record(pool)
        if pool.ndim != 3 or words != TILES.record_words(1, words):
            return f"records of shape {pool.shape[1:]} (only whole tiles, see record_layout)"
        if pool.shape[0] * words // LINES > INT32_MAX:
            return f"{pool.shape[0]} records of {words} words (offsets are 32 bit, in words / 8)"
    return None


def in_hbm(array: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """An operand that stays in HBM: XLA keeps small ones in VMEM, where no DMA from the host ends.

    A kernel's results are kept there by `out_shape=pltpu.HBM(...)`.
    """
    return array if tpu_interpret() else pltpu.with_memory_space_constraint(array, pltpu.HBM)


def poison(words: int) -> Int[Array, "8 lanes"]:
    """A record that does not exist, in device memory: host memory can be written from there."""
    return in_hbm(jnp.full((LINES, words // LINES), POISON, jnp.int32))


def chunks(ids: Int[Array, "n m"], size: int) -> Int[Array, "_ size"]:
    """Lists in chunks of so many entries, list after list; NO_SLOT fills them up."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), constant_values=NO_SLOT)
    return padded.reshape(-1, size)


def copy_record(
    source_ref: jax.Ref,
    target_ref: jax.Ref,
    poison_ref: jax.Ref,
    semaphore: jax.Ref,
    source: Int[Array, ""],
    target: Int[Array, ""],
    started: Int[Array, ""],
) -> Int[Array, ""]:
    """Start to copy record `source` to place `target`, if both are named and there is the place.

    Args:
        source_ref: records; one that is not there is `poison_ref`.
        target_ref: places.
        poison_ref: see `poison`.
        semaphore: DMA semaphore of all copies of records of this size.
        source: id.
        target: id.
        started: copies so far.

    Returns:
        The copies so far.
    """
    live = (source != NO_SLOT) & in_range(target, _count(target_ref, poison_ref))
    found = in_range(source, _count(source_ref, poison_ref))
    place = _record(target_ref, jnp.where(live, target, 0), poison_ref)

    @pl.when(live & (started >= IN_FLIGHT))
    def _wait() -> None:
        wait_record(poison_ref, semaphore)

    @pl.when(live & found)
    def _copy() -> None:
        record = _record(source_ref, jnp.where(found, source, 0), poison_ref)
        pltpu.make_async_copy(record, place, semaphore).start()

    @pl.when(live & ~found)
    def _poison() -> None:
        pltpu.make_async_copy(poison_ref, place, semaphore).start()

    return started + _number(live)


def wait_record(record_ref: jax.Ref, semaphore: jax.Ref) -> None:
    """Wait until one more record of the size of `record_ref` has arrived."""
    pltpu.make_async_copy(record_ref, record_ref, semaphore).wait()


def wait_all(record_ref: jax.Ref, semaphore: jax.Ref, started: Int[Array, ""]) -> None:
    """Wait for all copies that nobody has waited for."""
    left = jnp.minimum(started, IN_FLIGHT)
    lax.fori_loop(0, left, lambda _, __: wait_record(record_ref, semaphore), None)


def _record(pool_ref: jax.Ref, number: Int[Array, ""], record_ref: jax.Ref) -> Any:
    lanes = record_ref.shape[1]
    return pool_ref.at[:, pl.ds(pl.multiple_of(number * lanes, lanes), lanes)]


def _count(pool_ref: jax.Ref, record_ref: jax.Ref) -> int:
    return pool_ref.shape[1] // record_ref.shape[1]


def _number(condition: Bool[Array, ""]) -> Int[Array, ""]:
    return jnp.where(condition, jnp.int32(1), jnp.int32(0))
