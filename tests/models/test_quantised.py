"""Formats of quantised weights against float64 oracles, and matrix products with them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dhisparse_jax.configs.quantised import FORMATS, name_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.experts import Groups
from dhisparse_jax.models.quantised import decode_numbers, dequantise, format_of, scale_names
from dhisparse_jax.models.stored_experts import StoredMatrices
from tests.support.quantised import e2m1, e4m3, exact, quantise

# Blocks at the ends are cut off: 150 = 128 + 22 = 4 x 32 + 22.
ROWS, COLUMNS = 150, 176


def matrix(name, seed=0, rows=ROWS, columns=COLUMNS):
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-9, 9, (rows, columns // 8))).repeat(8, axis=1)
    return quantise((rng.normal(size=(rows, columns)) * sizes).astype(np.float32), FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_rows_equal_the_oracle(name):
    weights, (numbers, scales) = FORMATS[name], matrix(name)
    assert scales.shape == weights.scale_shape(ROWS, COLUMNS)
    expected = exact(numbers, scales, weights)
    for first, last in ((0, ROWS), (127, 129), (31, 33), (140, ROWS)):
        found = dequantise(numbers[first:last], scales, weights, first)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[first:last], rtol=2.0**-24, atol=0)


def test_scales_of_a_partial_block_are_counted():
    assert FORMATS["fp8"].scale_shape(576, 6144) == (5, 48)
    assert FORMATS["fp8-e8m0-32"].scale_shape(1280, 5120) == (40, 160)
    assert FORMATS["fp4"].scale_shape(2048, 4096) == (2048, 128)
    assert FORMATS["fp4"].stored_shape(2048, 4096) == (2048, 2048)


def test_every_number_of_8_bits_has_its_value():
    every = np.arange(256, dtype=np.uint8).reshape(1, -1).view(ml_dtypes.float8_e4m3fn)
    found = dequantise(every, np.ones((1, 2), np.float32), FORMATS["fp8"])[0]
    finite = [byte for byte in range(256) if byte & 127 != 127]
    assert found[finite].tolist() == [e4m3(byte) for byte in finite]
    assert np.isnan(found[[127, 255]]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_number_of_4_bits_has_its_value_and_its_place(dtype):
    every = np.arange(256, dtype=np.uint8).reshape(1, -1)
    expected = [e2m1(half) for byte in range(256) for half in (byte & 15, byte >> 4)]
    ones = np.ones((1, 16), ml_dtypes.float8_e8m0fnu)
    assert dequantise(every, ones, FORMATS["fp4"])[0].tolist() == expected
    assert decode_numbers(jnp.asarray(every), FORMATS["fp4"], dtype)[0].tolist() == expected


def test_names_of_scales_are_those_of_both_conventions():
    assert scale_names("a.b.weight") == ("a.b.weight_scale_inv", "a.b.scale")


def test_formats_follow_from_the_types_in_the_files():
    assert name_of(format_of("F8_E4M3", "F32", (128, 128))) == "fp8"
    assert name_of(format_of("F8_E4M3", "F8_E8M0", (32, 32))) == "fp8-e8m0-32"
    assert name_of(format_of("I8", "F8_E8M0", (128, 128))) == "fp4"
    with pytest.raises(UserError, match="scales are BF16, not one of F32, F8_E8M0"):
        format_of("F8_E4M3", "BF16", (128, 128))
    with pytest.raises(UserError, match="blocks of 16 x 16 cannot stay quantised"):
        name_of(format_of("F8_E4M3", "F32", (16, 16)))


def experts(name, count, rows, columns):
    """A stack of matrices as a module, and the same in float64."""
    stack = StoredMatrices(count, columns, rows, name)
    parts = [matrix(name, seed, rows, columns) for seed in range(count)]
    stack.numbers[...] = jnp.stack([jnp.asarray(numbers) for numbers, _ in parts])
    stack.scales[...] = jnp.stack([jnp.asarray(scales) for _, scales in parts])
    return stack, np.stack([exact(*part, FORMATS[name]) for part in parts])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [64, 176, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_stored_experts_are_within_the_stated_rounding(name, columns, dtype):
    """Also where an expert has no row, and where the last slab is not full."""
    stack, weights = experts(name, 4, 40, columns)
    rng = np.random.default_rng(1)
    sizes = np.array([3, 0, 5, 1], np.int32)
    owner = np.repeat(np.arange(4, dtype=np.int32), sizes)
    x = rng.normal(size=(len(owner), columns)).astype(jnp.dtype(dtype))
    found = jax.jit(lambda x, groups: stack(x, groups))(
        jnp.asarray(x), Groups(jnp.asarray(sizes), jnp.asarray(owner))
    )
    wide = x.astype(np.float64)
    expected = np.einsum("mi,moi->mo", wide, weights[owner])
    size = np.einsum("mi,moi->mo", np.abs(wide), np.abs(weights[owner]))
    bound = (columns + 3) * 2.0**-24 * size
    if dtype == "bfloat16":
        bound = bound + 2.0**-8 * (np.abs(expected) + bound)
    assert found.dtype == dtype
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert (error <= bound).all(), (error / bound).max()
    assert (error > 0).any()
