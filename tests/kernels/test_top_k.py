"""`top_k` against a plain sort of (score, position) pairs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import default_backend
from pallas_kernels.top_k import api, reference, triton
from pallas_kernels.top_k.cases import CASES
from tests.support.lowering import lowered_kernels
from tests.support.selections import adversarial, expected


def little_room(k):
    """Many blocks and as few candidates as can be: the first kernel has to narrow them down."""
    return triton.Tuning(block=16, candidates=max(16, 1 << (k - 1).bit_length()), unroll=2)


RUN = {
    "reference": reference.top_k,
    "triton": partial(triton.top_k, interpret=True),
    "triton_little_room": lambda scores, k: triton.top_k(
        scores, k, sizes=little_room(k), interpret=True
    ),
}
# Cases of one shape share a program.
JITTED = {
    name: jax.jit(run, static_argnames="k", compiler_options={"xla_backend_optimization_level": 0})
    for name, run in RUN.items()
}


@pytest.mark.parametrize("implementation", JITTED)
@pytest.mark.parametrize("name", CASES)
def test_equals_sorted_pairs(name, implementation):
    scores, k = CASES[name]()
    selection = np.asarray(JITTED[implementation](scores, k=k))
    assert selection.dtype == np.int32
    np.testing.assert_array_equal(selection, expected(scores, k))


@pytest.mark.parametrize("implementation", JITTED)
def test_adversarial_scores(implementation):
    rng = np.random.default_rng(0)
    for _ in range(4):
        scores = np.stack([[adversarial(rng, 96)] for _ in range(12)])
        selection = JITTED[implementation](scores, k=8)
        np.testing.assert_array_equal(selection, expected(scores, 8))


def test_long_row_with_the_sizes_of_production():
    """More than one turn of both loops, and groups of several positions."""
    scores = np.random.default_rng(0).normal(size=(1, 1, 40_000)).astype(np.float32)
    selection = jax.jit(partial(triton.top_k, k=512, interpret=True))(scores)
    np.testing.assert_array_equal(selection, expected(scores, 512))


@pytest.mark.parametrize(("positions", "k"), [(100_000, 2048), (125_000, 512), (4096, 2048)])
def test_lowers_for_cuda(positions, k):
    scores = jax.ShapeDtypeStruct((128, 1, positions), np.float32)
    short = positions <= triton.tuning(k).candidates
    assert lowered_kernels(partial(triton.top_k, k=k), scores) == (1 if short else 2)


def test_what_is_not_supported_is_refused_with_a_reason():
    scores = jnp.zeros((1, 1, 5000))
    reason = "K = 5000 is more than 4096"
    assert triton.supports(5000, 5000) == reason
    with pytest.raises(NotImplementedError, match=reason):
        api.top_k(scores, 5000, backend="triton")
    assert triton.supports(125_000, 2048) is None
    assert default_backend("top_k", "gpu") == "triton"
    np.testing.assert_array_equal(api.top_k(scores, 5000), [[np.arange(5000)]])
