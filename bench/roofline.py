"""The least time that an operation can take: bytes and flops it cannot avoid over measured rates.

The rates are measured in the same process as the kernels (`dhisparse_jax.engine.rates`).
"""

from typing import NamedTuple

from dhisparse_jax.engine.rates import Floors


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
