"""Index scores, top-K and attention on a TPU, interpreted: all cases, with races detected."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.scaled_rows import V41_ENTRY, V41_WINDOW
from pallas_kernels.index_scores import api as scores_api
from pallas_kernels.index_scores import cases as scores_cases
from pallas_kernels.index_scores import tpu as scores_tpu
from pallas_kernels.sparse_attention import cases as attention_cases
from pallas_kernels.sparse_attention import tpu as attention_tpu
from pallas_kernels.sparse_attention import tpu_rows
from pallas_kernels.top_k import api as top_k_api
from pallas_kernels.top_k import cases as top_k_cases
from pallas_kernels.top_k import tpu as top_k_tpu
from tests.support import attention, scores
from tests.support.selections import adversarial, expected
from tests.support.tpu import no_races, tiled

__all__ = ["no_races"]

pytestmark = pytest.mark.usefixtures("no_races")

QUICK = {"xla_backend_optimization_level": 0}


def slow_unless(cheap, cases):
    """All cases; those that take long or are like others only where slow ones are run."""
    return [
        name if name in cheap else pytest.param(name, marks=pytest.mark.slow) for name in cases
    ]


score = jax.jit(partial(scores_api.index_scores, backend="tpu"), compiler_options=QUICK)
top_k = jax.jit(
    partial(top_k_api.top_k, backend="tpu"), static_argnames="k", compiler_options=QUICK
)



@pytest.mark.parametrize("name", scores_cases.CASES)
def test_index_scores(name):
    inputs = scores_cases.CASES[name]()
    scores.assert_close(inputs, score(*inputs))


@pytest.mark.parametrize("name", top_k_cases.CASES)
def test_top_k(name):
    found, k = top_k_cases.CASES[name]()
    np.testing.assert_array_equal(top_k(found, k=k), expected(found, k))


attend = partial(attention.run, backend="tpu")


@pytest.mark.parametrize("name", attention_cases.CASES)
def test_sparse_attention(name):
    inputs = attention_cases.CASES[name]()
    attention.assert_close(inputs, attend(inputs))


@pytest.mark.parametrize("name", ["glm_verify", "glm_fp8", "v4", "second_layer", "odd_sizes"])
def test_sparse_attention_over_tiles(name):
    """As pools are on a TPU; rows that start within a line too."""
    inputs = attention_cases.CASES[name]()
    attention.assert_close(inputs, attend(inputs._replace(slots=tiled(inputs.slots))))
