"""What the formats of history round, apart from everything else."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.scaled_rows import (
    GLM_FP8,
    V4_ENTRY,
    V41_ENTRY,
    V41_WINDOW,
    ScaledRow,
    decode,
    encode,
    scales_of,
)
from pallas_kernels.index_scores.types import packed_format, quantise

ROWS = {
    "glm": GLM_FP8,
    "v3.2": ScaledRow(quantised=512, group=128, scale="float32", rest=64, power_scales=True),
    "v4": V4_ENTRY,
    "v4.1 window": V41_WINDOW,
    "tiny": ScaledRow(quantised=64, group=64, scale="float32", rest=16),
}

RELATIVE = 2.0**-4
"""Half the distance of neighbours: e4m3 has 3 bits behind the first."""

LEAST = 2.0**-10
"""The same below the least number with that many bits, in units of the scale."""

REST = 2.0**-8
"""Of bfloat16, which has 7 bits behind the first."""


def values(*shape, seed=0):
    """Groups of very unlike size, whose numbers are of very unlike size too."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 0, shape)
    return (numbers * 10.0 ** rng.uniform(-15, 15, (*shape[:-1], 1))).astype(np.float32)


def bound(groups, power_scales):
    """The most that a number may be off, from the format alone."""
    scale = np.abs(groups).max(axis=-1, keepdims=True) / 448.0
    return np.maximum(RELATIVE * np.abs(groups), LEAST * scale * (2.0 if power_scales else 1.0))


@pytest.mark.parametrize("name", ROWS)
def test_error_of_a_row(name):
    row = ROWS[name]
    given = values(300, row.width)
    found = np.asarray(decode(encode(jnp.asarray(given), row), row), np.float64)
    off = np.abs(found - given)
    split = lambda array: array[:, : row.quantised].reshape(300, row.groups, row.group)
    powers = row.power_scales or row.scale == "e8m0"
    allowed = bound(split(given).astype(np.float64), powers)
    share = split(off) / allowed
    assert 0.9 < share.max() <= 1.0
    rest = slice(row.quantised, None)
    assert (off[:, rest] <= REST * np.abs(given[:, rest])).all()


@pytest.mark.parametrize("name", ROWS)
def test_error_in_terms_of_the_largest_number_of_a_block(name):
    """The largest numbers are 16 apart by half, of 448: 1/28, and 1/14 with scales of twice that.

    So 2^-4 of the largest number of a block covers all but power-of-two scales.
    """
    row = ROWS[name]
    given = values(300, row.width, seed=1)
    found = np.asarray(decode(encode(jnp.asarray(given), row), row), np.float64)
    blocks = lambda array: np.abs(array[:, : row.quantised]).reshape(300, row.groups, row.group)
    largest = blocks(given).max(axis=-1)
    powers = row.power_scales or row.scale == "e8m0"
    assert (blocks(found - given).max(axis=-1) <= largest / (14 if powers else 28) * 1.0001).all()


@pytest.mark.parametrize("powers", [False, True])
def test_error_of_an_index_key(powers):
    given = values(500, 128, seed=2)
    keys = quantise(jnp.asarray(given), power_scales=powers)
    found = np.asarray(keys.numbers, np.float64) * np.asarray(keys.scales, np.float64)[:, None]
    share = np.abs(found - given) / bound(given.astype(np.float64), powers)
    assert 0.9 < share.max() <= 1.0


def test_power_of_two_scales():
    """Each the least power of two that no number overflows with; powers stay what they are."""
    largest = 448.0 * np.array([1.0, 2.0, 0.25, 1.0000001, 1.9999999, 3.0, 0.0, 1e-30], np.float32)
    found = np.asarray(scales_of(jnp.asarray(largest)[:, None], power_scales=True))
    wanted = [1, 2, 0.25, 2, 2, 4, 2.0**-120, 2.0 ** np.ceil(np.log2(1e-30))]
    np.testing.assert_array_equal(found, np.array(wanted, np.float32))


@pytest.mark.parametrize("name", ROWS)
def test_rounding_again_changes_nothing(name):
    """But the last bit of a scale that is no power of two."""
    row = ROWS[name]
    kept = decode(encode(jnp.asarray(values(100, row.width, seed=3)), row), row)
    np.testing.assert_allclose(decode(encode(kept, row), row), kept, rtol=3e-7)


@pytest.mark.parametrize("row", [V41_ENTRY, packed_format(128)], ids=["entry", "index key"])
def test_numbers_of_4_bits_are_the_nearest(row):
    """By the published rule: the largest number of a group over 6, as e4m3 or the next power."""
    rng = np.random.default_rng(4)
    given = (rng.normal(size=(200, row.width)) * 2.0 ** rng.integers(-4, 4, (200, 1))).astype("f")
    given[0] = 0.0
    given[1, : row.group] = np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], row.group)
    groups = given.reshape(200, row.groups, row.group)
    largest = np.abs(groups).max(-1, keepdims=True)
    if row.scale == "e4m3":
        scales = np.maximum(largest / 6, 2.0**-9).astype(ml_dtypes.float8_e4m3fn).astype("f")
    else:
        scales = np.exp2(np.ceil(np.log2(np.maximum(largest / 6, 2.0**-120))))
    clipped = np.clip(groups / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype("f")
    found = decode(encode(jnp.asarray(given), row), row)
    np.testing.assert_array_equal(found, (clipped * scales).reshape(given.shape))
    assert found[1, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_sizes_are_those_published():
    assert (V41_WINDOW.bytes, V41_ENTRY.bytes, packed_format(128).bytes) == (528, 288, 68)
    narrow = packed_format(12)
    assert (narrow.group, narrow.groups, narrow.bytes) == (4, 3, 12)
