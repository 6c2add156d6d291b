"""`sparse_attention` against float64 NumPy, and the Mosaic kernel as it is lowered for a GPU.

The kernel has stages in PTX, so it cannot be interpreted: tests/gpu runs it on the same cases.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.scaled_rows import GLM_FP8, V4_ENTRY, ScaledRow, decode, encode
from pallas_kernels.sparse_attention import mosaic
from pallas_kernels.sparse_attention.cases import CASES, NAN_WORD, random
from tests.support.attention import arguments, assert_close, attended, options, run


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, run(inputs))


@pytest.mark.parametrize("name", ["all_masked", "one_masked_request"])
def test_nothing_selected_gives_exact_zeros(name):
    inputs = CASES[name]()
    empty = (inputs.location < 0).all(axis=-1)
    assert empty.any()
    values, lse = run(inputs)
    assert (values[empty] == 0.0).all()
    assert np.isneginf(lse[empty]).all()


def test_a_query_that_selects_nothing_has_its_sinks():
    inputs = CASES["sinks"]()
    values, lse = run(inputs)
    assert (values[1] == 0.0).all()
    np.testing.assert_allclose(lse[1, 0], inputs.sinks, rtol=1e-6)


def test_order_of_the_selection_hardly_matters():
    inputs = CASES["float32"]()
    reversed_ = inputs._replace(location=inputs.location[..., ::-1].copy())
    np.testing.assert_allclose(run(inputs)[0], run(reversed_)[0], rtol=1e-6, atol=1e-6)


def test_a_slot_that_is_selected_twice_counts_twice():
    inputs = random(requests=1, top_k=3, selected=(3,))
    a, b = inputs.location[0, 0, :2]
    twice = inputs._replace(location=np.array([[[a, a, b]]], np.int32))
    assert_close(twice, run(twice))
    once = inputs._replace(location=np.array([[[a, b, -1]]], np.int32))
    assert np.abs(attended(twice)[1] - attended(once)[1]).min() > 1e-3


@pytest.mark.parametrize("row", [GLM_FP8, V4_ENTRY])
def test_scaled_rows_have_the_published_sizes_and_little_error(row):
    assert row.bytes == {GLM_FP8: 656, V4_ENTRY: 584}[row]
    spread = 10.0 ** np.random.default_rng(1).uniform(-6, 4, (50, 1))
    values = (np.random.default_rng(0).normal(size=(50, row.width)) * spread).astype(np.float32)
    values[0] = 0.0
    words = encode(jnp.asarray(values), row)
    assert words.shape == (50, row.words)
    back = np.asarray(decode(words, row))
    # e4m3 has 3 bits after the leading one; below 2**-6 of the scale its steps are even.
    head = values[:, : row.quantised].reshape(50, -1, row.group)
    most = np.abs(head).max(axis=-1, keepdims=True)
    allowed = np.maximum(np.abs(head) * 2.0**-4, most * 2.0**-16)
    error = np.abs(back[:, : row.quantised].reshape(head.shape) - head)
    assert (error <= allowed * 1.001).all()
    assert (error > 0).mean() > 0.5
    np.testing.assert_array_equal(
        back[:, row.quantised :],
        values[:, row.quantised :].astype(jnp.bfloat16).astype(np.float32),
    )


def test_decoded_rows_equal_what_numpy_reads_from_the_bytes():
    values = np.random.default_rng(0).normal(size=(4, 576)).astype(np.float32)
    words = np.asarray(encode(jnp.asarray(values), GLM_FP8))
    raw = words.view(np.uint8).reshape(4, 656)
    numbers = raw[:, :512].copy().view(jnp.float8_e4m3fn).astype(np.float32)
    scales = raw[:, 512:528].copy().view(np.float32)
    rest = raw[:, 528:].copy().view(jnp.bfloat16).astype(np.float32)
    wanted = np.concatenate([numbers * np.repeat(scales, 128, axis=1), rest], axis=1)
    np.testing.assert_array_equal(np.asarray(decode(jnp.asarray(words), GLM_FP8)), wanted)


REFUSED = {
    "queries of float32": {},
    "rows of float32": {"query": jnp.bfloat16},
    "rows of 700 numbers": {"width": 700, "value_width": 512, "dtype": "bfloat16"},
    "a row that starts at 24 bytes": {"dtype": "bfloat16", "layer": 1},
    "rows of 40 bytes": {"width": 20, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_unsupported_shape_says_why(reason):
    how = dict(REFUSED[reason])
    query = how.pop("query", None)
    inputs = random(**how)
    if query:
        inputs = inputs._replace(query=inputs.query.astype(query))
    with pytest.raises(NotImplementedError, match=f"cannot run this: {reason}"):
        run(inputs, backend="mosaic")


def test_a_row_format_that_is_not_in_whole_tiles_is_refused():
    odd = ScaledRow(quantised=96, group=32, scale="float32", rest=64)
    inputs = random(width=160, value_width=96, dtype="bfloat16", scaled=odd)
    assert_close(inputs, run(inputs))
    with pytest.raises(NotImplementedError, match="whole tiles of 64"):
        run(inputs, backend="mosaic")


LOWERED = ["glm_small", "glm_verify", "glm_fp8_verify", "v4_verify", "glm_sinks"]


@pytest.mark.parametrize("name", LOWERED)
def test_the_kernel_lowers_for_a_gpu_without_a_copy_of_the_records(name):
    """Without a GPU too: shapes, layouts and shared memory are checked on the way."""
    inputs = CASES[name]()
    slots = jax.ShapeDtypeStruct((1 << 20, inputs.slots.shape[1]), jnp.int32)
    query, _, location, *sinks = arguments(inputs)
    attend = partial(mosaic.sparse_attention, **options(inputs))
    lowered = jax.jit(attend).trace(query, slots, location, *sinks)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom_call" in line]
    assert len(calls) == 1
    made = [line for line in text.splitlines() if f"-> tensor<{1 << 20}x" in line]
    assert not made, "the records are copied"


def test_the_kernel_lowers_at_production_size():
    struct = jax.ShapeDtypeStruct
    attend = partial(
        mosaic.sparse_attention, offset=288, row_format=jnp.bfloat16, value_width=512, scale=1.0
    )
    for requests, queries in ((128, 1), (128, 8), (16, 1)):
        traced = jax.jit(attend).trace(
            struct((requests, queries, 64, 576), jnp.bfloat16),
            struct((1 << 20, 1152), jnp.int32),
            struct((requests, queries, 2048), jnp.int32),
        )
        traced.lower(lowering_platforms=("cuda",))


def test_poison_stands_where_nobody_reads():
    inputs = CASES["glm_sinks"]()
    assert (inputs.slots == NAN_WORD).all(axis=1).sum() > 100
