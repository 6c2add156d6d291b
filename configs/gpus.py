"""GPUs: what they hold, what they do at most, and what share of it each stage of a step reaches.

`python -m bench.decode_gpu` prints the share that each stage reached, which belongs here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class Rates(NamedTuple):
    """What a machine does: bytes per second of its memory and of its link, and flops per second."""

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


_PRODUCTS = Speed(0.53)
"""fp8 matrices times few bfloat16 rows, by XLA: 32 experts of GLM-5.3, whose floor is 281 us, take
485 us with 8 rows each and 571 us with 32."""

_BFLOAT16 = Speed(0.8)
"""bfloat16 matrices times few rows: assumed."""

H200 = Gpu(
    device_bytes=0.95 * 139 * 2**30,
    rates=Rates(hbm=4.15e12, link=54.5e9, flops=693e12),
    speeds=MappingProxyType(
        {
            "experts": _PRODUCTS,
            # Assumed to be as fast as the experts, being the same kind of product.
            "attention weights": _PRODUCTS,
            "shared expert": _PRODUCTS,
            "dense layers": _PRODUCTS,
            "indexer": _PRODUCTS,
            "router": _BFLOAT16,
            "head": _BFLOAT16,
            # index_scores 16_requests_T1_fp8 and T8_fp8: 68 and 210 us, floors 52 and 151.
            "index": Speed(0.74),
            # top_k: 100 us for 128 rows of 100,000, 40 us for two short ones.
            "top-K": Speed(call_us=40, token_us=0.47),
            # plan 16_requests_T1 and T8: 28 and 45 us.
            "plan": Speed(call_us=26, token_us=0.15),
            # sparse_attention 128_requests_T8_fp8: 1,017 us, floor 421; 16_requests_T1: 48 us,
            # nearly all of which is not the floor's 10.
            "attend": Speed(0.43, call_us=40),
            # retrieve 2688B_16MB: 389 us, floor 309; 656B_8: 9 us, all of it latency.
            "retrieve": Speed(0.80, call_us=8),
            # Assumed: bfloat16 products, and some 150 small kernels of 1.75 us.
            "draft": Speed(0.7, call_us=260),
            # Assumed: some 20 small kernels in a layer (norms, rotations, routing, appending), of
            # 1.75 us: a step of 400 kernels that the device gets as one graph takes 0.7 ms.
            "rest": Speed(call_us=35),
        }
    ),
)
"""NVIDIA H200. What is measured is in bench/results/h200/kernels.json, or says what was."""

GPUS: Mapping[str, Gpu] = MappingProxyType({"h200": H200})
"""By the name that commands take."""
