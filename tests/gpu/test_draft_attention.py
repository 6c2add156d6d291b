"""`draft_attention` on a GPU, against float64 and, at the sizes of GLM's drafts, the reference."""

from functools import partial

import jax
import numpy as np
import pytest

from bench.ops.draft_attention import CASES as PRODUCTION
from pallas_kernels.draft_attention import reference, triton
from pallas_kernels.draft_attention.api import draft_attention
from pallas_kernels.draft_attention.cases import CASES
from tests.support.draft_attention import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("name", CASES)
def test_draft_attention(name):
    inputs = CASES[name]()
    run = jax.jit(partial(draft_attention, backend="triton"))
    assert_close(inputs, run(*inputs))


@pytest.mark.parametrize("name", PRODUCTION)
def test_draft_attention_of_glm(name):
    *operands, layers = PRODUCTION[name].build("triton").operands
    found = jax.jit(triton.draft_attention)(*operands, layers[-1])
    wanted = jax.jit(reference.draft_attention)(*operands, layers[-1])
    one, other = (np.asarray(each, np.float32) for each in (found, wanted))
    np.testing.assert_allclose(one, other, rtol=2.0**-7, atol=2.0**-5 * other.std())
