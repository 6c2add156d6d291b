"""Index scores, top-K and attention on a TPU, interpreted: all cases, with races detected."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import targeting
from pallas_kernels.common.rows import unpack
from pallas_kernels.common.scaled_rows import (
    GLM_FP8,
    V4_ENTRY,
    V41_ENTRY,
    V41_WINDOW,
    ScaledRow,
    decode,
)
from pallas_kernels.index_scores import api as scores_api
from pallas_kernels.index_scores import cases as scores_cases
from pallas_kernels.index_scores import tpu as scores_tpu
from pallas_kernels.sparse_attention import cases as attention_cases
from pallas_kernels.sparse_attention import tpu as attention_tpu
from pallas_kernels.sparse_attention import tpu_rows
from pallas_kernels.top_k import api as top_k_api
from pallas_kernels.top_k import cases as top_k_cases
from tests.support import attention, scores
from tests.support.selections import adversarial, expected
from tests.support.tpu import no_races, only_interpreted, tiled

__all__ = ["no_races"]

pytestmark = pytest.mark.usefixtures("no_races")

QUICK_SCORES = [
    *("glm_verify", "glm_lengths", "glm_odd_length", "glm_fp8", "not_a_number", "odd_sizes"),
    *("one_position", "nothing_visible", "poisoned_future", "negative_weights", "unrelated"),
]
QUICK_TOP_K = [
    *("verify", "ties", "signed_zeros", "holes", "one_bit_apart", "nothing_visible", "ascending"),
    *("fewer_visible", "all_of_them", "best_of_one"),
]
QUICK_ATTENTION = [
    *("glm_small", "glm_fp8", "sinks", "float32", "fourth_layer_bfloat16", "one_masked_request"),
    *("best_of_one", "slot_zero_masked", "huge_logits", "odd_sizes"),
]
"""Cases that take little time, one or two for each thing that can go wrong; the others are slow."""

QUICK = {"xla_backend_optimization_level": 0}


def slow_unless(cheap, cases):
    """All cases; those that are not cheap only where slow ones are run."""
    slow = lambda name: pytest.param(name, marks=pytest.mark.slow)
    return [name if name in cheap else slow(name) for name in cases]


score = jax.jit(partial(scores_api.index_scores, backend="tpu"), compiler_options=QUICK)
top_k = jax.jit(
    partial(top_k_api.top_k, backend="tpu"), static_argnames="k", compiler_options=QUICK
)


@pytest.mark.parametrize("name", slow_unless(QUICK_SCORES, scores_cases.CASES))
def test_index_scores(name):
    inputs = scores_cases.CASES[name]()
    scores.assert_close(inputs, score(*inputs))


@pytest.mark.parametrize(
    "make",
    [
        # Two groups of queries, blocks that one request sees and another does not.
        partial(scores_cases.glm, queries=9, heads=30, positions=300, visible=(290, 1)),
        # More than there is: prefill sees its whole last chunk, of which some is padding.
        partial(scores_cases.random, positions=200, visible=(199, 0), queries=3),
        partial(scores_cases.fp8, positions=300, visible=(129, 128), queries=2),
    ],
)
def test_index_scores_in_several_blocks(make):
    inputs = make()
    run = partial(scores_tpu.index_scores, tuning=scores_tpu.Tuning(block=128))
    with targeting("tpu"):
        scores.assert_close(inputs, jax.jit(run, compiler_options=QUICK)(*inputs))


@pytest.mark.parametrize("name", slow_unless(QUICK_TOP_K, top_k_cases.CASES))
def test_top_k(name):
    found, k = top_k_cases.CASES[name]()
    np.testing.assert_array_equal(top_k(found, k=k), expected(found, k))


def test_top_k_of_adversarial_scores():
    """In two programs, the second of which has fewer rows."""
    rng = np.random.default_rng(0)
    found = np.stack([[adversarial(rng, 96)] for _ in range(12)])
    np.testing.assert_array_equal(top_k(found, k=8), expected(found, 8))


def test_top_k_of_a_long_row():
    """Several blocks of chunks; ties that go on from one to the next; ranks in two tiles."""
    found = np.random.default_rng(0).integers(0, 100, (1, 1, 20_000)).astype(np.float32)
    np.testing.assert_array_equal(top_k(found, k=150), expected(found, 150))
    found = np.where(np.arange(20_000) % 150 == 0, 1.0, 0.0).astype(np.float32)[None, None]
    np.testing.assert_array_equal(top_k(found, k=150), expected(found, 150))


attend = partial(attention.run, backend="tpu")


@pytest.mark.parametrize("name", slow_unless(QUICK_ATTENTION, attention_cases.CASES))
def test_sparse_attention(name):
    inputs = attention_cases.CASES[name]()
    attention.assert_close(inputs, attend(inputs))


@pytest.mark.parametrize(
    "name", slow_unless(["glm_fp8"], ["glm_verify", "glm_fp8", "v4", "odd_sizes"])
)
def test_sparse_attention_over_tiles(name):
    """As pools are on a TPU; rows that start within a line too."""
    inputs = attention_cases.CASES[name]()
    attention.assert_close(inputs, attend(inputs._replace(slots=tiled(inputs.slots))))


def test_sparse_attention_in_several_blocks():
    """Some of which select nothing, of one query or of all."""
    inputs = attention_cases.random(queries=2, top_k=40, selected=(40, 0), dtype="bfloat16")
    inputs.location[0, 1, :16] = -1
    inputs.location[0, 0, 16:] = -1
    run = partial(attention_tpu.sparse_attention, tuning=attention_tpu.Tuning(block=16))
    with targeting("tpu"):
        attention.assert_close(inputs, attention.run(inputs, run))


@pytest.mark.slow
@pytest.mark.parametrize("row", [V41_ENTRY, V41_WINDOW])
def test_sparse_attention_over_other_rows(row):
    inputs = attention_cases.random(
        width=512, value_width=512, dtype="bfloat16", scaled=row, top_k=16, selected=(16, 3)
    )
    attention.assert_close(inputs, attend(inputs))


@only_interpreted
def test_a_slot_that_is_not_there_raises():
    inputs = attention_cases.random(slots=13, top_k=4, selected=(4, 4))
    inputs.location[1, 0, 2] = 13
    with pytest.raises(Exception, match="Out-of-bounds"):
        attend(inputs)


@pytest.mark.parametrize("row", [GLM_FP8, V4_ENTRY, V41_ENTRY, V41_WINDOW, jnp.bfloat16])
def test_every_byte_of_a_row_is_read_as_the_reference_reads_it(row):
    """All bit patterns, NaN and what is below the normal numbers too; bit for bit."""
    width = 576 if row in (GLM_FP8, jnp.bfloat16) else 512
    found = tpu_rows.parts(width, row)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (64, 4 * tpu_rows.row_words(width, row)), np.uint8)
    words = jnp.asarray(raw.view(np.int32))
    planes = tpu_rows.decoded(tpu_rows.aligned(words, 0), found, row, jnp.float32)
    numbers = np.full((64, width), np.nan, np.float32)
    for lane, number in enumerate(tpu_rows.numbers_of_lanes(found, width)):
        if number < 0:
            assert (planes[:, lane] == 0.0).all()
        else:
            numbers[:, number] = planes[:, lane]
    wanted = decode(words, row) if isinstance(row, ScaledRow) else unpack(words, row)
    np.testing.assert_array_equal(numbers, wanted.astype(jnp.float32))


@pytest.mark.parametrize("row", [GLM_FP8, V4_ENTRY, V41_ENTRY, jnp.float32])
def test_planes_and_back(row):
    width = 576 if row == GLM_FP8 else 512
    found = tpu_rows.parts(width, row)
    values = np.random.default_rng(0).normal(size=(2, 3, width)).astype(np.float32)
    planes = tpu_rows.to_planes(jnp.asarray(values), found)
    np.testing.assert_array_equal(tpu_rows.from_planes(planes, found), values)


def test_unlike_operands_say_why():
    mixed = scores_cases.glm(visible=(96, 41))
    mixed = mixed._replace(keys=mixed.keys.astype(np.float32))
    with pytest.raises(NotImplementedError, match="queries of bfloat16 with keys of float32"):
        score(*mixed)
    wanted = jax.ShapeDtypeStruct((1, 1, 2_000_000), jnp.float32)
    with pytest.raises(NotImplementedError, match="2000000 positions take"):
        jax.eval_shape(partial(top_k_api.top_k, k=2048, backend="tpu"), wanted)
    odd = attention_cases.random(dtype="bfloat16")._replace(row_format="float16")
    with pytest.raises(NotImplementedError, match="rows of float16"):
        attend(odd)
