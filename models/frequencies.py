"""Frequencies of rotary embeddings, plain and stretched."""

import math

import numpy as np

from dhisparse_jax.configs.rope import Yarn

Frequencies = tuple[float, ...]
"""Radians per position of each channel pair; hashable, so that modules can keep them."""


def rope_frequencies(channels: int, theta: float, yarn: Yarn | None = None) -> Frequencies:
    """Frequencies of the pairs of `channels`: `theta ** (-2 i / channels)` of pair i.

    With YaRN (Peng et al., 2023, section 3.2), slow pairs are divided by the factor and fast ones
    stay. The pair that turns b times within the pretraining context has the number
    `channels ln(context / (2 pi b)) / (2 ln theta)`; between those of `beta_fast` and `beta_slow`
    the two are blended in proportion.

    Rounded to float32 at every step, as published implementations do it: an angle is a frequency
    times a position, and makes a difference in the last digit as many times larger.
    """
    exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    periods = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    plain = 1 / periods
    if yarn is None:
        return tuple(plain.tolist())

    def pair_of(turns: float) -> float:
        return channels * math.log(yarn.context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), channels - 1)
    width = high - low if high != low else 0.001
    kept = 1 - np.clip((np.arange(len(plain), dtype=np.float32) - low) / width, 0, 1)
    slow = 1 / (np.float32(yarn.factor) * periods)
    return tuple((slow * (1 - kept) + plain * kept).tolist())
