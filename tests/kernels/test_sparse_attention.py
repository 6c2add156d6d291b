"""`sparse_attention` against float64 NumPy: the reference, and the Triton kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.rows import pack
from pallas_kernels.sparse_attention import reference, triton
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.cases import CASES, NAN_WORD, random

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


IMPLEMENTATIONS = {
    "reference": reference.sparse_attention,
    "triton": partial(triton.sparse_attention, interpret=True),
}


def attended(inputs):
    query, rows = inputs.query.astype(np.float64), inputs.rows.astype(np.float64)
    values = np.zeros((*query.shape[:3], inputs.value_width))
    lse = np.full(query.shape[:3], -np.inf)
    for request, t, head in np.ndindex(*query.shape[:3]):
        location = inputs.location[request, t]
        selected = rows[location[location >= 0]]
        if len(selected):
            logits = inputs.scale * selected @ query[request, t, head]
            weights = np.exp(logits - logits.max())
            values[request, t, head] = weights / weights.sum() @ selected[:, : inputs.value_width]
            lse[request, t, head] = logits.max() + np.log(weights.sum())
    return values, lse


def run(inputs, attend=sparse_attention, **more):
    options = {name: getattr(inputs, name) for name in inputs._fields[3:7]}
    values, lse = jax.jit(partial(attend, **options, **more))(*inputs[:3])
    return np.asarray(values), np.asarray(lse)


def assert_close(inputs, found, tolerance=None):
    values, lse = found
    assert values.dtype == inputs.query.dtype
    assert lse.dtype == np.float32
    near = {name: tolerance or TOLERANCE[inputs.row_dtype] for name in ("rtol", "atol")}
    wanted, wanted_lse = attended(inputs)
    np.testing.assert_allclose(values.astype(np.float64), wanted, **near)
    np.testing.assert_allclose(lse, wanted_lse, **near)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, backend):
    inputs = CASES[name]()
    assert_close(inputs, run(inputs, IMPLEMENTATIONS[backend]))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["all_masked", "one_masked_request"])
def test_nothing_selected_gives_exact_zeros(name, backend):
    inputs = CASES[name]()
    empty = (inputs.location < 0).all(axis=-1)
    assert empty.any()
    values, lse = run(inputs, IMPLEMENTATIONS[backend])
    assert (values[empty] == 0.0).all()
    assert np.isneginf(lse[empty]).all()


def test_order_of_the_selection_hardly_matters():
    inputs = CASES["float32"]()
    reversed_ = inputs._replace(location=inputs.location[..., ::-1].copy())
    np.testing.assert_allclose(run(inputs)[0], run(reversed_)[0], rtol=1e-6, atol=1e-6)


SCATTERED = partial(random, requests=2, queries=3, heads=5, top_k=150, slots=400, magnitude=3.0)
"""More rows than a block, a last block that is not full, heads that fill no matrix side."""


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("block", [16, 64])
def test_any_tuning_of_the_kernel_is_right(block, splits):
    # With 4 splits request 1, which selects 3 rows, has parts that select nothing.
    inputs = SCATTERED(selected=(150, 3))
    tuning = triton.Tuning(block=block, splits=splits)
    assert_close(inputs, run(inputs, IMPLEMENTATIONS["triton"], tuning=tuning))


def test_more_heads_than_a_program_holds():
    inputs = random(heads=2 * triton.MOST_HEADS + 3, queries=2)
    assert_close(inputs, run(inputs, IMPLEMENTATIONS["triton"]))


@pytest.mark.parametrize("queries, rows", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_rows_and_queries_of_two_dtypes(queries, rows):
    inputs = SCATTERED(selected=(150, 70), magnitude=1.0, dtype=rows)
    inputs = inputs._replace(query=inputs.query.astype(jnp.dtype(queries)))
    found = run(inputs, IMPLEMENTATIONS["triton"])
    assert_close(inputs, found, TOLERANCE[queries])


def test_masked_entries_do_not_read_poison():
    """Slot 0 stands in for NO_SLOT, and so do the slots beside the selected ones."""
    inputs = SCATTERED(selected=(90, 0))
    location = np.where(inputs.location == 0, -1, inputs.location)
    slots = inputs.slots.copy()
    slots[0] = NAN_WORD
    inputs = inputs._replace(location=location, slots=slots)
    assert (slots == NAN_WORD).all(axis=1).sum() > 100
    assert_close(inputs, run(inputs, IMPLEMENTATIONS["triton"]))


def test_an_unsupported_shape_says_why():
    inputs = CASES["glm_float32"]()
    with pytest.raises(NotImplementedError, match="float32 values of 512 numbers"):
        run(inputs, backend="triton")
    wide = random(width=300, value_width=12, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="288 numbers after the value"):
        run(wide, backend="triton")
    fp8 = inputs._replace(row_dtype="float8_e4m3fn", query=inputs.query[..., :12], value_width=8)
    with pytest.raises(NotImplementedError, match="rows of float8_e4m3fn"):
        run(fp8, backend="triton")


def lowered(query, slots, location, row_dtype, tuning=None):
    attend = partial(
        triton.sparse_attention,
        offset=0,
        row_dtype=row_dtype,
        value_width=512,
        scale=1.0,
        tuning=tuning,
    )
    traced = jax.jit(attend).trace(query, slots, location)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernel_gets_the_records_where_they_are():
    """On a GPU the words are typed anew, not converted: a hot pool must not be copied."""
    shapes = [((128, 1, 64, 576), jnp.bfloat16), ((1 << 20, 1152), jnp.int32)]
    query, slots = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    text = lowered(query, slots, jax.ShapeDtypeStruct((128, 1, 2048), jnp.int32), jnp.bfloat16)
    assert "bitcast_convert" not in text
    [call] = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    assert "tensor<1048576x1152xi32>" in call.rsplit(" : ", 1)[1], "the records became another type"


def test_typed_rows_are_taken_as_they_are():
    rows = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    np.testing.assert_array_equal(
        triton.typed_view(pack(jnp.asarray(rows)), np.float32, interpret=True), rows
    )
