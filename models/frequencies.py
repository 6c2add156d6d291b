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
    """
    plain = [theta ** (-2 * pair / channels) for pair in range(channels // 2)]
    if yarn is None:
        return tuple(plain)

    def pair_of(turns: float) -> float:
        return channels * math.log(yarn.context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), channels - 1)
    width = high - low if high != low else 0.001
    slowed = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    return tuple((np.array(plain) * (1 - slowed + slowed / yarn.factor)).tolist())
