"""GPUs: what they hold, what they do at most, and what share of it each stage of a step reaches.

`python -m bench.decode_gpu` prints the share that each stage reached, which belongs here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class Rates(NamedTuple):
    """What a machine does: bytes per second of its memory and of its link, and flops per second.

    Attributes:
        hbm: bytes per second of its memory.
        link: bytes per second from host memory.
        flops: per second.
    """

    hbm: float
    link: float
    flops: float


class Speed(NamedTuple):
    """How long a stage takes beside its floor.

    Attributes:
        share: of the rate that bounds it.
        call_us: microseconds that each call takes beside.
        token_us: and each token of it.
    """

    share: float = 1.0
    call_us: float = 0.0
    token_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as a planner knows it.

    Attributes:
        device_bytes: that JAX gives out.
        rates: of copies and matrix products, measured.
        speeds: of the stages of a step.
    """

    device_bytes: float
    rates: Rates
    speeds: Mapping[str, Speed]


H200 = Gpu(
    device_bytes=0.95 * 139 * 2**30,
    rates=Rates(hbm=4.15e12, link=54.5e9, flops=693e12),
    speeds=MappingProxyType(
        {
            # fp8 matrices times fp8 rows, by cuBLAS. A layer's experts take 302 us with the 4 rows
            # that 16 tokens of 8 GPUs give each, 345 us with 32; their floor is 290.
            "experts": Speed(0.978, token_us=0.36),
            "attention weights": Speed(0.5, token_us=0.2),
            "shared expert": Speed(0.43, token_us=0.02),
            "dense layers": Speed(0.7),
            "indexer": Speed(0.8, call_us=9, token_us=0.03),
            "router": Speed(0.8, call_us=6, token_us=0.02),
            "head": Speed(1.0),
            "index": Speed(0.8, call_us=5),
            "top-K": Speed(call_us=75, token_us=0.17),
            # 21 us for 4,096 slots of a request, 65 for 28,000, 101 for 100,000.
            "plan": Speed(call_us=30, token_us=0.28),
            "attend": Speed(0.45, call_us=20),
            "retrieve": Speed(0.95, call_us=8),
            "draft": Speed(0.6, call_us=100),
            # Appending, adapting, backup, copies, and what nothing runs in: 3.3 to 8.6 ms a step.
            "rest": Speed(call_us=40, token_us=0.55),
        }
    ),
)
"""NVIDIA H200; measured by `python -m bench.decode_gpu` at 16 requests of GLM-5.3: the five cells
in bench/results/h200/decode_gpu.json, whose steps these speeds give within 7 %."""

GPUS: Mapping[str, Gpu] = MappingProxyType({"h200": H200})
"""By the name that commands take."""
