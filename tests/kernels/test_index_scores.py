"""`index_scores` against float64 NumPy: the reference, and the Triton kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import reference, triton
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.cases import CASES, random

IMPLEMENTATIONS = {
    "reference": reference.index_scores,
    "triton": partial(triton.index_scores, interpret=True),
}


def expected(inputs):
    """Scores in float64, one position at a time."""
    queries, keys = inputs.queries.astype(np.float64), inputs.keys.astype(np.float64)
    scores = np.full((*inputs.visible.shape, keys.shape[1]), -np.inf)
    for request, query in np.ndindex(*inputs.visible.shape):
        for position in range(min(inputs.visible[request, query], keys.shape[1])):
            relevance = np.maximum(queries[request, query] @ keys[request, position], 0.0)
            scores[request, query, position] = inputs.weights[request, query] @ relevance
    return scores


def assert_close(inputs, scores):
    scores, wanted = np.asarray(scores), expected(inputs)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(wanted))
    seen = ~np.isneginf(wanted)
    np.testing.assert_allclose(scores[seen], wanted[seen], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, backend):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(IMPLEMENTATIONS[backend])(*inputs))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
def test_hidden_keys_do_not_matter(backend):
    inputs = CASES["poisoned_future"]()
    clean = inputs.keys.copy()
    clean[0, 40:], clean[1] = 0.0, 0.0
    run = jax.jit(IMPLEMENTATIONS[backend])
    np.testing.assert_array_equal(run(*inputs), run(*inputs._replace(keys=clean)))


def test_the_kernel_does_not_read_hidden_keys():
    """Not even NaN, in blocks that are partly visible and in blocks that are not at all."""
    inputs = random(positions=150, visible=(37, 1), queries=3, dtype="bfloat16")
    keys = inputs.keys.copy()
    keys[0, 39:], keys[1, 3:] = np.nan, np.nan
    tuning = triton.Tuning(block=16, steps=2, queries=4)
    scores = jax.jit(partial(IMPLEMENTATIONS["triton"], tuning=tuning))(*inputs._replace(keys=keys))
    assert_close(inputs, scores)


@pytest.mark.parametrize("queries, together, product", [(1, 1, 1), (3, 4, 2), (3, 2, 2), (9, 8, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_tuning_of_the_kernel_is_right(queries, together, product, dtype):
    """Groups of queries that are not full, a run of positions that ends within a block."""
    inputs = random(queries=queries, positions=135, heads=5, visible=(126, 40), dtype=dtype)
    tuning = triton.Tuning(block=32, steps=2, queries=together, product=product)
    assert_close(inputs, jax.jit(partial(IMPLEMENTATIONS["triton"], tuning=tuning))(*inputs))


def test_lengths_zero_and_one():
    inputs = random(requests=3, positions=70, visible=(0, 1, 70))
    assert_close(inputs, jax.jit(IMPLEMENTATIONS["triton"])(*inputs))


def test_visible_beyond_the_history():
    """More than there is: prefill sees its whole last chunk, of which some is padding."""
    inputs = random(positions=37, visible=(37, 36), queries=4)
    assert_close(inputs, jax.jit(IMPLEMENTATIONS["triton"])(*inputs))


def test_an_unsupported_shape_says_why():
    run = jax.jit(partial(index_scores, backend="triton"))
    inputs = random(width=160)
    with pytest.raises(NotImplementedError, match="float32 keys of 160 numbers"):
        run(*inputs)
    mixed = inputs._replace(queries=inputs.queries.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="queries of bfloat16 with keys of float32"):
        run(*mixed)
    with pytest.raises(NotImplementedError, match="65 heads"):
        run(*random(heads=65))


def test_float32_products_are_exact_on_a_gpu():
    """Not tf32: the lowered kernel asks for IEEE products."""
    shapes = [((2, 1, 32, 128), "float32"), ((2, 1, 32), "float32"), ((2, 256, 128), "float32")]
    operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    visible = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    jaxpr = str(jax.make_jaxpr(triton.index_scores)(*operands, visible))
    assert "HIGHEST" in jaxpr
    traced = jax.jit(triton.index_scores).trace(*operands, visible)
    assert "__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
