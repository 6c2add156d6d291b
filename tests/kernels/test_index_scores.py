"""`index_scores` against float64 NumPy: the reference, and the GPU kernels interpreted.

The Mosaic kernel runs in the interpreter of GPU kernels, which has threads, barriers and copies,
but none of the matrix units' products; tests/gpu runs all of it on the same cases.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.mosaic import interpreter
from pallas_kernels.index_scores import mosaic, reference, triton
from pallas_kernels.index_scores.api import index_scores
from pallas_kernels.index_scores.cases import CASES, fp8, glm, random
from pallas_kernels.index_scores.types import quantise
from tests.support.lowering import lowered
from tests.support.scores import assert_close

TRITON = partial(triton.index_scores, interpret=True)
FLOAT32 = [name for name, make in CASES.items() if make().queries.dtype == np.float32]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(reference.index_scores)(*inputs))


@pytest.mark.parametrize("name", FLOAT32)
def test_the_triton_kernel_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(TRITON)(*inputs))


@pytest.mark.parametrize("run", [reference.index_scores, TRITON])
def test_hidden_keys_do_not_matter(run):
    inputs = CASES["poisoned_future"]()
    clean = inputs.keys.copy()
    clean[0, 40:], clean[1] = 0.0, 0.0
    run = jax.jit(run)
    np.testing.assert_array_equal(run(*inputs), run(*inputs._replace(keys=clean)))


def test_the_triton_kernel_does_not_read_hidden_keys():
    """Not even NaN, in blocks that are partly visible and in blocks that are not at all."""
    inputs = random(positions=150, visible=(37, 1), queries=3)
    keys = inputs.keys.copy()
    keys[0, 39:], keys[1, 3:] = np.nan, np.nan
    run = partial(TRITON, tuning=triton.Tuning(block=16, programs=8))
    assert_close(inputs, jax.jit(run)(*inputs._replace(keys=keys)))


def test_lengths_zero_and_one():
    inputs = random(requests=3, positions=70, visible=(0, 1, 70))
    assert_close(inputs, jax.jit(TRITON)(*inputs))


def test_visible_beyond_the_history():
    """More than there is: prefill sees its whole last chunk, of which some is padding."""
    inputs = random(positions=37, visible=(37, 36), queries=4)
    assert_close(inputs, jax.jit(TRITON)(*inputs))


@pytest.mark.parametrize(
    ("make", "tuning"),
    [
        # Rows that share programs, programs that share a row, and one that is not visible at all.
        # Whole tiles: where the last two have keys in common, both write the same numbers there,
        # which the interpreter of jax 0.11 calls a race if programs do it at the same time.
        (
            partial(glm, requests=3, positions=192, visible=(192, 0, 65)),
            mosaic.Tuning(stages=4, programs=2),
        ),
        # Two groups of queries, heads that fill no unit, keys that fill no tile, turns.
        (
            partial(glm, queries=9, heads=30, positions=131, visible=(125, 1)),
            mosaic.Tuning(stages=2, buffers=1, turns=True, programs=1),
        ),
        # Tiles of 128 fp8 keys, a consumer without a tile in the last round, NaN beyond the end.
        (
            partial(fp8, queries=2, heads=5, positions=300, visible=(290, 3)),
            mosaic.Tuning(rows=128, stages=2, turns=True, programs=1),
        ),
    ],
)
def test_the_mosaic_kernel_interpreted(make, tuning, capfd):
    inputs = make()
    run = partial(mosaic.index_scores, tuning=tuning, interpret=interpreter())
    assert_close(inputs, jax.jit(run)(*inputs))
    assert "RACE DETECTED" not in capfd.readouterr().out


def shapes(keys, *, queries=8, heads=32, requests=16, positions=100_000):
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct((requests, *sizes), jnp.dtype(dtype))
    operands = (
        shape("float32" if keys == "float32" else "bfloat16", queries, heads, 128),
        shape("float32", queries, heads),
        shape("bfloat16" if keys == "fp8" else keys, positions, 128),
        shape("int32", queries),
    )
    if keys != "fp8":
        return operands
    return *operands[:2], jax.eval_shape(quantise, operands[2]), operands[3]


@pytest.mark.parametrize("queries", [1, 3, 8, 17])
@pytest.mark.parametrize("keys", ["bfloat16", "fp8"])
def test_the_mosaic_kernel_lowers_for_a_gpu(keys, queries):
    text = lowered(partial(index_scores, backend="mosaic"), *shapes(keys, queries=queries))
    assert text.count("custom_call @mosaic_gpu") == 1
    # Keys go to the kernel as they are: no padding, no copy.
    assert "tensor<16x100000x128" not in "".join(
        line for line in text.splitlines() if "stablehlo.pad" in line
    )


def test_unlike_operands_say_why():
    run = jax.jit(index_scores, static_argnames="backend")
    named = partial(run, backend="triton")
    with pytest.raises(NotImplementedError, match="keys of 160 numbers"):
        named(*random(width=160))
    with pytest.raises(NotImplementedError, match="65 heads"):
        named(*random(heads=65))
    with pytest.raises(NotImplementedError, match="no triton kernel for operands like these"):
        named(*glm(visible=(96, 41)))
    named = partial(run, backend="mosaic")
    with pytest.raises(NotImplementedError, match="no mosaic kernel for operands like these"):
        named(*random())
    with pytest.raises(NotImplementedError, match="keys of 16 numbers"):
        named(*random(dtype="bfloat16"))
    with pytest.raises(NotImplementedError, match="264 heads"):
        named(*random(dtype="bfloat16", width=64, heads=264))
    mixed = glm(visible=(96, 41))
    with pytest.raises(NotImplementedError, match="keys of float32"):
        named(*mixed._replace(keys=mixed.keys.astype(np.float32)))


def test_quantised_keys_are_near_and_use_the_whole_range():
    keys = np.random.default_rng(0).normal(size=(2, 50, 128)).astype(np.float32)
    keys *= np.exp(np.linspace(-20, 20, 50))[:, None]
    keys[1, 7] = 0.0
    scaled = quantise(jnp.asarray(keys, jnp.float32))
    numbers, scales = (np.asarray(part, np.float64) for part in scaled)
    np.testing.assert_array_equal(np.abs(numbers).max(axis=-1)[keys.any(axis=-1)], 448)
    assert (np.abs(numbers * scales[..., None] - keys) <= bound_of_error(keys, scales)).all()
    assert (numbers[1, 7] == 0.0).all()


def bound_of_error(keys, scales):
    """Half a unit in the last of four digits, or of the smallest numbers; and float32's own."""
    return np.maximum(np.abs(keys) * 2.0**-4, scales[..., None] * 2.0**-10) * (1 + 1e-6)


def test_float32_products_are_exact_on_a_gpu():
    """Not tf32: the lowered kernel asks for IEEE products."""
    operands = shapes("float32", queries=1, requests=2, positions=256)
    assert "HIGHEST" in str(jax.make_jaxpr(triton.index_scores)(*operands))
    assert "__gpu$xla.gpu.triton" in lowered(triton.index_scores, *operands)
