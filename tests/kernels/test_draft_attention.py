"""`draft_attention` against float64 NumPy: the reference, and the kernel interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.draft_attention import reference, triton
from pallas_kernels.draft_attention.api import draft_attention
from pallas_kernels.draft_attention.cases import CASES, UNSEEN, glm, random
from pallas_kernels.draft_attention.types import KeysValues, RingSeen
from tests.support.draft_attention import assert_close
from tests.support.lowering import lowered_kernels

INTERPRETED = jax.jit(partial(triton.draft_attention, interpret=True), static_argnames=("tuning",))

LARGE = ("glm_dflash2", "glm_dspark")
SLOW = (*LARGE, "ungrouped_heads", "sees_itself_alone", "large_logits", "tiny_logits")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in CASES]
)
def test_the_reference_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, jax.jit(reference.draft_attention)(*inputs))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]
)
def test_the_kernel_equals_float64(name):
    inputs = CASES[name]()
    assert_close(inputs, INTERPRETED(*inputs))


@pytest.mark.parametrize(
    "tuning",
    [
        triton.Tuning(block=16, programs=1),
        triton.Tuning(block=16, programs=12),
        pytest.param(triton.Tuning(block=32, programs=1000), marks=pytest.mark.slow),
        pytest.param(triton.Tuning(block=128), marks=pytest.mark.slow),
    ],
)
def test_any_cut_is_right(tuning):
    inputs = random(committed=(500, 3, 0, 72), dim=32)
    assert_close(inputs, INTERPRETED(*inputs, tuning=tuning))


def test_what_no_row_sees_is_not_read():
    inputs = random(window=20)
    found = INTERPRETED(*inputs)
    ring = jax.tree.map(lambda part: jnp.where(part == UNSEEN, jnp.nan, part), inputs.ring)
    assert jnp.isnan(ring.keys[:, 1]).any()
    np.testing.assert_array_equal(INTERPRETED(*inputs._replace(ring=ring)), found)


def test_a_request_knows_nothing_of_the_others():
    inputs = random(committed=(150, 61, 9))
    sizes = triton.Tuning(block=32, programs=12)  # as many splits for one request as for three
    found = INTERPRETED(*inputs, tuning=sizes)
    alone = jax.tree.map(lambda x: x[1:2], inputs[:3])
    seen = RingSeen(inputs.seen.next[1:2], inputs.seen.counts[1:2], inputs.seen.block)
    one = INTERPRETED(*alone, seen, 1, tuning=triton.Tuning(block=32, programs=4))
    np.testing.assert_array_equal(one[0], found[1])


def mixed():
    inputs = random()
    return inputs._replace(queries=inputs.queries.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (mixed(), "numbers of bfloat16, float32"),
        (random(dtype="float16"), "numbers of float16"),
        (random(dim=8), "heads of 8 numbers"),
        (random(dim=24), "heads of 24 numbers"),
        (random(block=16, heads=9, kv=1), "144 query rows of a key head .at most 128"),
        (random(block=9, dim=128), "36 query rows of a key head .at most 32"),
    ],
)
def test_what_the_kernel_refuses_is_an_error_where_it_is_named(inputs, reason):
    with pytest.raises(NotImplementedError, match=reason):
        draft_attention(*inputs, backend="triton")


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_five_layers_are_traced_once(requests, dtype):
    """And lowered once, into one kernel that all layers call."""
    shape = lambda *sizes, of=dtype: jax.ShapeDtypeStruct(sizes, of)
    ring = shape(requests, 5, 2056, 16, 64)
    own = shape(requests, 8, 16, 64)
    seen = RingSeen(
        shape(requests, of=jnp.int32), shape(requests, 8, of=jnp.int32), shape(8, 8, of=jnp.bool_)
    )

    def layers(queries, ring, own, seen):
        attend = partial(draft_attention, queries, ring, own, seen, backend="triton")
        return [attend(layer) for layer in range(5)]

    assert default_backend("draft_attention", "cuda") == "triton"
    operands = KeysValues(ring, ring), KeysValues(own, own), seen
    assert lowered_kernels(layers, shape(requests, 8, 64, 64), *operands) == 1


def test_glm_is_more_than_one_block_and_no_multiple_of_one():
    inputs = glm()
    assert inputs.ring.keys.shape[2] % triton.Tuning().block
    assert inputs.seen.counts.max() % triton.Tuning().block
