"""The least time that an operation can take: bytes and flops it cannot avoid over measured rates.

The rates are measured in the same process as the kernels: a device-to-device copy, a full
host-to-device copy of a pinned array, a matrix product, and the launch of an empty kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bench.timing import measure
from dhisparse_jax.hierarchy.state import host_sharding


class Traffic(NamedTuple):
    """What one call has to do at least.

    Attributes:
        hbm_bytes: bytes read and written in device memory.
        link_bytes: bytes that cross the link between host and device.
        flops: multiplications and additions.
    """

    hbm_bytes: float = 0
    link_bytes: float = 0
    flops: float = 0


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


class Bound(NamedTuple):
    """The floor of a call: its time, and what sets it: `hbm`, `link`, `flops` or `latency`."""

    us: float
    name: str


def bound(traffic: Traffic, floors: Floors) -> Bound:
    """The largest of the times that bytes, flops and the launch take."""
    times = {
        "hbm": traffic.hbm_bytes / floors.hbm_gbps / 1e3,
        "link": traffic.link_bytes / floors.h2d_gbps / 1e3,
        "flops": traffic.flops / floors.bf16_tflops / 1e6,
        "latency": floors.launch_us,
    }
    name = max(times, key=times.__getitem__)
    return Bound(times[name], name)


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


def _copy(state: tuple[()], words: jax.Array, _: int) -> tuple[tuple[()], jax.Array]:
    return state, jnp.copy(words)


def _fetch(state: tuple[()], host: jax.Array, _: int) -> tuple[tuple[()], jax.Array]:
    return state, jax.device_put(host, jax.memory.Space.Device)


def _product(state: jax.Array, square: jax.Array, _: int) -> tuple[jax.Array, None]:
    return state @ square, None


def _tick(state: jax.Array, _: tuple[()], __: int) -> tuple[jax.Array, None]:
    return lax.optimization_barrier(state + 1), None
