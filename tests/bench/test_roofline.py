"""The bound of a call."""

import pytest

from bench.roofline import Traffic, bound
from dhisparse_jax.engine.rates import Floors

FLOORS = Floors(hbm_gbps=4000, h2d_gbps=50, bf16_tflops=800, launch_us=2)


@pytest.mark.parametrize(
    ("traffic", "name", "us"),
    [
        (Traffic(hbm_bytes=4e9), "hbm", 1000),
        (Traffic(hbm_bytes=5e6, link_bytes=5e6), "link", 100),
        (Traffic(hbm_bytes=4e6, flops=8e11), "flops", 1000),
        (Traffic(link_bytes=5e3), "latency", 2),
        (Traffic(), "latency", 2),
    ],
)
def test_bound_is_the_slowest_part(traffic, name, us):
    least = bound(traffic, FLOORS)
    assert least.name == name
    assert least.us == pytest.approx(us)
