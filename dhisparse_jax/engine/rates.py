"""What the machine can do: rates of its memories and of the link, measured in this process.

A device-to-device copy, a full host-to-device copy of a pinned array, a matrix product, the launch
of an empty kernel; and reads of random host records by the library's own operation.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from dhisparse_jax.engine.timing import Timing, chain, measure, measure_chain
from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.common.record_layout import record_layout
from pallas_kernels.common.rows import WORD_BYTES
from pallas_kernels.retrieve.api import retrieve
from pallas_kernels.retrieve.types import Fetches


class Floors(NamedTuple):
    """Measured rates of this machine.

    Attributes:
        hbm_gbps: device-to-device copy, bytes read and bytes written both counted.
        h2d_gbps: full copy of a pinned host array to the device.
        bf16_tflops: square bfloat16 matrix product.
        launch_us: a dependent kernel that does nothing.
    """

    hbm_gbps: float
    h2d_gbps: float
    bf16_tflops: float
    launch_us: float


def measure_floors(runs: int, *, copy_bytes: int = 2 << 30, side: int = 8192) -> Floors:
    """Measure the floors.

    Args:
        runs: how often each is timed.
        copy_bytes: size of the copied arrays; larger than every cache.
        side: rows and columns of the matrices.
    """
    words = jax.random.bits(jax.random.key(0), (copy_bytes // 4,), jnp.uint32)
    copied = measure(_copy, (), words, calls=1, runs=runs)[0].median
    host = jax.device_put(words, host_sharding())
    del words
    fetched = measure(_fetch, (), host, calls=1, runs=runs)[0].median
    # Variance 1 / side: the products stay as random as the factors, and finite.
    square = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16) * side**-0.5
    product = measure(_product, jnp.copy(square), square, calls=4, runs=runs)[0].median
    launch = measure(_tick, jnp.zeros(8, jnp.int32), (), calls=64, runs=runs)[0].median
    return Floors(
        hbm_gbps=2 * copy_bytes / copied / 1e3,
        h2d_gbps=copy_bytes / fetched / 1e3,
        bf16_tflops=2 * side**3 / product / 1e6,
        launch_us=launch,
    )


class ReadRate(NamedTuple):
    """How fast random records of a host pool are read.

    Attributes:
        record_bytes: size of a record.
        span_bytes: how much host memory the records are spread over.
        gbps: bytes of records per second, median.
        low: first quartile.
        high: third quartile.
    """

    record_bytes: int
    span_bytes: int
    gbps: float
    low: float
    high: float


CPU_FLOORS = {"copy_bytes": 32 << 20, "side": 256}
"""Sizes for `measure_floors` that a CPU copies and multiplies in milliseconds."""

RECORD_WORDS = (164, 288, 672, 1152)
"""Records of 656 B and 1,152 B (a row in fp8 and bf16), 2,688 B and 4,608 B (four of them)."""

CALLS = 6
"""Reads in a chain, each of other records."""


def read_rates(
    record_words: int, spans: tuple[int, ...], *, call_bytes: int, runs: int
) -> Iterator[ReadRate]:
    """Read rates of one record size, from one pool as large as the largest span.

    Args:
        record_words: int32 words of a record; a TPU pads them to whole tiles.
        spans: bytes of the pool's beginning that the records come from; each holds a call's.
        call_bytes: bytes of the records of one call.
        runs: how often each is timed.
    """
    record = _record(record_words)
    size = math.prod(record) * WORD_BYTES
    count = call_bytes // size
    make = jax.jit(_zeros, static_argnums=(0, 1))
    host = jax.block_until_ready(make(max(spans) // size, record))
    slots = jnp.zeros((4 * count, *record), jnp.int32)
    run = chain(_read, CALLS)
    for span in spans:
        fetches = _random_fetches(span // size, count)
        timing, slots, _ = measure_chain(run, slots, (host, fetches), calls=CALLS, runs=runs)
        yield _rate(size, span, count * size, timing)


def _record(words: int) -> tuple[int, ...]:
    """Dimensions of a record of so many words: as they are, or in whole tiles where it has to."""
    records = record_layout()
    return records.shape(records.record_words(1, words)) if records.line else (words,)


def _rate(size: int, span: int, moved: int, timing: Timing) -> ReadRate:
    gbps = [moved / us / 1e3 for us in (timing.median, timing.high, timing.low)]
    return ReadRate(size, span, *gbps)


def _random_fetches(records: int, count: int) -> tuple[Fetches, ...]:
    """Distinct random records into distinct random slots, as many lists as a chain has calls."""
    rng = np.random.default_rng(0)
    draw = lambda among: jnp.asarray(rng.choice(among, count, replace=False)[None], jnp.int32)
    number = jnp.full(1, count, jnp.int32)
    return tuple(Fetches(draw(records), draw(4 * count), number) for _ in range(CALLS))


def _zeros(records: int, record: tuple[int, ...]) -> Int[Array, "N *W"]:
    """A pool, filled on the device, which is faster, and moved to the host."""
    return jax.device_put(jnp.zeros((records, *record), jnp.int32), jax.memory.Space.Host)


def _read(
    slots: Int[Array, "S *W"],
    operands: tuple[Int[Array, "N *W"], tuple[Fetches, ...]],
    call: int,
) -> tuple[Int[Array, "S *W"], None]:
    host, fetches = operands
    return retrieve(host, slots, fetches[call]), None


def _copy(state: tuple[()], words: jax.Array, _: int) -> tuple[tuple[()], jax.Array]:
    return state, jnp.copy(words)


def _fetch(state: tuple[()], host: jax.Array, _: int) -> tuple[tuple[()], jax.Array]:
    return state, jax.device_put(host, jax.memory.Space.Device)


def _product(state: jax.Array, square: jax.Array, _: int) -> tuple[jax.Array, None]:
    return state @ square, None


def _tick(state: jax.Array, _: tuple[()], __: int) -> tuple[jax.Array, None]:
    return lax.optimization_barrier(state + 1), None
